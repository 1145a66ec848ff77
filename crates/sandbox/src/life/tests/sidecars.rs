//! Native sidecars, and the order in which containers stop.

use std::time::Duration;

use serde_json::json;

use crate::life::sim::{Script, Sim, World};
use Script::{Ends, Obeys, Stubborn};

life! {
    async fn sidecars_start_in_order_and_stop_in_reverse() {
        let sim = Sim::new()
            .script("s", &[Obeys(1, 0)])
            .script("t", &[Obeys(1, 0)])
            .script("i", &[Ends(2, 0)])
            .script("a", &[Obeys(3, 0)]);
        let world = World::new(&sim, json!({
            "initContainers": [
                {"name": "s", "restartPolicy": "Always"},
                {"name": "i"},
                {"name": "t", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "a"}],
        }));
        world.at(3).await;
        assert_eq!(world.word("s"), "running ready");
        assert_eq!(world.word("a"), "running ready");
        world.stop(30);
        world.finish().await;
        assert_eq!(sim.log_of(&["start", "signal", "exit"]), [
            "0 start s#0", "0 start i#0", "2 exit i 0", "2 start t#0", "2 start a#0",
            "3 signal a 15", "6 exit a 0", "6 signal t 15", "7 exit t 0", "7 signal s 15", "8 exit s 0",
        ]);
    }
}

life! {
    async fn sidecars_stop_after_the_last_regular_container() {
        let sim = Sim::new().script("a", &[Ends(5, 0)]).script("s", &[Obeys(0, 0)]);
        let world = World::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        world.finish().await;
        assert_eq!(sim.now(), 5);
        assert_eq!(world.word("s"), "ended Completed 0");
        assert_eq!(world.word("a"), "ended Completed 0");
    }
}

life! {
    async fn sidecars_restart_despite_restart_policy_never() {
        let sim = Sim::new().script("s", &[Ends(3, 0), Obeys(0, 0)]);
        let world = World::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        world.at(4).await;
        assert_eq!(world.word("s"), "running (last Completed 0) r1 ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start s#0", "0 start a#0", "3 start s#1"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn sidecar_startup_probe_blocks_later_containers() {
        let sim = Sim::new();
        let clock = std::rc::Rc::downgrade(&sim);
        sim.exec(move |_, _| {
            let up = clock.upgrade().is_some_and(|sim| sim.now() >= 6);
            (Duration::ZERO, i32::from(!up))
        });
        let world = World::new(&sim, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always", "startupProbe":
                {"exec": {"command": ["up"]}, "periodSeconds": 2, "failureThreshold": 10}}],
            "containers": [{"name": "a"}],
        }));
        world.at(5).await;
        assert_eq!(world.word("s"), "running");
        assert_eq!(world.status("s").started, Some(false));
        assert_eq!(world.word("a"), "waiting PodInitializing");
        world.at(7).await;
        assert_eq!(world.word("s"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start s#0", "6 start a#0"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn all_containers_share_the_grace_period() {
        let sim = Sim::new().script("a", &[Stubborn]).script("s", &[Stubborn]);
        let world = World::new(&sim, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        world.at(1).await;
        world.stop(10);
        world.finish().await;
        // The sidecar gets its stop signal at the end of the grace period at the latest, and SIGKILL two seconds later.
        assert_eq!(sim.log_of(&["signal"]), [
            "1 signal a 15", "11 signal s 15", "11 signal a 9", "13 signal s 9",
        ]);
    }
}

life! {
    async fn init_container_crash_leaves_sidecars_running() {
        let sim = Sim::new().script("i", &[Ends(1, 1), Ends(1, 0)]);
        let world = World::new(&sim, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        world.at(3).await;
        assert_eq!(sim.log_of(&["start"]), ["0 start s#0", "0 start i#0", "1 start i#1", "2 start a#0"]);
        world.stop(1);
        world.finish().await;
    }
}
