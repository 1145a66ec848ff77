//! postStart, preStop and stop signals.

use std::time::Duration;

use serde_json::json;

use crate::life::sim::{Script, Sim, World};
use Script::{Obeys, Stubborn};

life! {
    async fn post_start_hook_delays_the_running_state() {
        let sim = Sim::new();
        sim.exec(|_, _| (Duration::from_secs(5), 0));
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"postStart": {"exec": {"command": ["hook"]}}}},
            {"name": "b"},
        ]}));
        world.at(4).await;
        assert_eq!(world.word("a"), "waiting ContainerCreating");
        assert_eq!(world.word("b"), "waiting ContainerCreating");
        world.at(5).await;
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["start", "exec"]), ["0 start a#0", "0 exec a hook", "5 start b#0"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failed_post_start_hook_kills_the_container() {
        let sim = Sim::new();
        sim.exec(|_, _| (Duration::from_secs(1), 7));
        let world = World::new(&sim, json!({"terminationGracePeriodSeconds": 4, "containers": [
            {"name": "a", "lifecycle": {"postStart": {"exec": {"command": ["hook", "x"]}}}},
        ]}));
        world.at(2).await;
        assert_eq!(world.word("a"), "waiting PostStartHookError (last Error 143) r1");
        let message = world.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some(
            "Exec lifecycle hook ([hook x]) for Container \"a\" in Pod \"p_ns(u)\" failed - \
             error: command 'hook x' exited with 7, message: \"what it said\""
        ));
        let events = world.events("a");
        assert!(events.contains(&"FailedPostStartHook: PostStartHook failed".to_owned()));
        assert!(events.contains(&"Killing: FailedPostStartHook".to_owned()));
        world.at(5).await;
        assert_eq!(world.word("a"), "waiting CrashLoopBackOff (last Error 143) r1");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn pre_stop_counts_into_the_grace_period() {
        let sim = Sim::new().script("a", &[Stubborn]);
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"sleep": {"seconds": 4}}}},
        ]}));
        world.at(1).await;
        world.stop(10);
        world.finish().await;
        assert_eq!(sim.log_of(&["signal"]), ["5 signal a 15", "11 signal a 9"]);
    }
}

life! {
    async fn grace_period_bounds_the_pre_stop_hook() {
        let sim = Sim::new().script("a", &[Stubborn]);
        sim.exec(|_, _| (Duration::from_secs(100), 0));
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}},
        ]}));
        world.at(1).await;
        world.stop(10);
        world.finish().await;
        assert_eq!(sim.log_of(&["exec", "signal"]), ["1 exec a hook", "11 signal a 15", "13 signal a 9"]);
    }
}

life! {
    async fn failed_pre_stop_hook_is_reported() {
        let sim = Sim::new();
        sim.exec(|_, _| (Duration::ZERO, 1));
        let spec = json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}},
        ]});
        let world = World::new(&sim, spec.clone());
        world.at(1).await;
        world.stop(10);
        world.finish().await;
        assert!(world.events("a").contains(&"FailedPreStopHook: PreStopHook failed".to_owned()));

        let sim = Sim::new();
        let world = World::new(&sim, spec);
        world.at(1).await;
        world.stop(0);
        world.finish().await;
        assert!(sim.log_of(&["exec"]).is_empty());
    }
}

life! {
    async fn unreachable_http_hook_fails() {
        let sim = Sim::new().script("a", &[Obeys(0, 0)]);
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"postStart": {"httpGet": {"port": 80, "path": "/x"}}}},
        ]}));
        world.at(1).await;
        let message = world.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some(
            "HTTP lifecycle hook (/x) for Container \"a\" in Pod \"p_ns(u)\" failed - error: \
             Get \"http://10.0.0.7:80/x\": dial tcp 10.0.0.7:80: connect: connection refused"
        ));
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn spec_can_set_the_stop_signal() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"stopSignal": "SIGUSR1"}},
        ]}));
        world.at(1).await;
        assert_eq!(world.status("a").stop_signal.as_deref(), Some("SIGUSR1"));
        world.stop(10);
        world.finish().await;
        assert_eq!(sim.log_of(&["signal"]), ["1 signal a 10"]);
    }
}
