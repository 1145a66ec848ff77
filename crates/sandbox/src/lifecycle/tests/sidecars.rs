//! Native sidecars, and the order in which containers stop.

use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{ScriptedRun, SimulatedRuntime, TestPod};
use ScriptedRun::{Exits, ExitsOnStop, IgnoresStop};

lifecycle_test! {
    async fn sidecars_start_in_order_and_stop_in_reverse() {
        let sim = SimulatedRuntime::new()
            .script("s", &[ExitsOnStop(1, 0)])
            .script("t", &[ExitsOnStop(1, 0)])
            .script("i", &[Exits(2, 0)])
            .script("a", &[ExitsOnStop(3, 0)]);
        let pod = TestPod::new(&sim, json!({
            "initContainers": [
                {"name": "s", "restartPolicy": "Always"},
                {"name": "i"},
                {"name": "t", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(3).await;
        assert_eq!(pod.summary("s"), "running ready");
        assert_eq!(pod.summary("a"), "running ready");
        pod.stop(30);
        pod.finished().await;
        assert_eq!(sim.log_of(&["start", "signal", "exit"]), [
            "0 start s#0", "0 start i#0", "2 exit i 0", "2 start t#0", "2 start a#0",
            "3 signal a 15", "6 exit a 0", "6 signal t 15", "7 exit t 0", "7 signal s 15", "8 exit s 0",
        ]);
    }
}

lifecycle_test! {
    async fn sidecars_stop_after_the_last_regular_container() {
        let sim = SimulatedRuntime::new().script("a", &[Exits(5, 0)]).script("s", &[ExitsOnStop(0, 0)]);
        let pod = TestPod::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        pod.finished().await;
        assert_eq!(sim.now(), 5);
        assert_eq!(pod.summary("s"), "terminated Completed 0");
        assert_eq!(pod.summary("a"), "terminated Completed 0");
    }
}

lifecycle_test! {
    async fn sidecars_restart_despite_restart_policy_never() {
        let sim = SimulatedRuntime::new().script("s", &[Exits(3, 0), ExitsOnStop(0, 0)]);
        let pod = TestPod::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(4).await;
        assert_eq!(pod.summary("s"), "running (last Completed 0) r1 ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start s#0", "0 start a#0", "3 start s#1"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn sidecar_startup_probe_blocks_later_containers() {
        let sim = SimulatedRuntime::new();
        let clock = std::rc::Rc::downgrade(&sim);
        sim.exec(move |_, _| {
            let up = clock.upgrade().is_some_and(|sim| sim.now() >= 6);
            (Duration::ZERO, i32::from(!up))
        });
        let pod = TestPod::new(&sim, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always", "startupProbe":
                {"exec": {"command": ["up"]}, "periodSeconds": 2, "failureThreshold": 10}}],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(5).await;
        assert_eq!(pod.summary("s"), "running");
        assert_eq!(pod.status("s").started, Some(false));
        assert_eq!(pod.summary("a"), "waiting PodInitializing");
        pod.advance_to(7).await;
        assert_eq!(pod.summary("s"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start s#0", "6 start a#0"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn all_containers_share_the_grace_period() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]).script("s", &[IgnoresStop]);
        let pod = TestPod::new(&sim, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(1).await;
        pod.stop(10);
        pod.finished().await;
        // The sidecar gets its stop signal at the end of the grace period at the latest, and SIGKILL two seconds later.
        assert_eq!(sim.log_of(&["signal"]), [
            "1 signal a 15", "11 signal s 15", "11 signal a 9", "13 signal s 9",
        ]);
    }
}

lifecycle_test! {
    async fn init_container_crash_leaves_sidecars_running() {
        let sim = SimulatedRuntime::new().script("i", &[Exits(1, 1), Exits(1, 0)]);
        let pod = TestPod::new(&sim, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(3).await;
        assert_eq!(sim.log_of(&["start"]), ["0 start s#0", "0 start i#0", "1 start i#1", "2 start a#0"]);
        pod.stop(1);
        pod.finished().await;
    }
}
