//! postStart, preStop and stop signals.

use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{ScriptedRun, SimulatedRuntime, TestPod};
use ScriptedRun::{ExitsOnStop, IgnoresStop};

lifecycle_test! {
    async fn post_start_hook_delays_the_running_state() {
        let sim = SimulatedRuntime::new();
        sim.exec(|_, _| (Duration::from_secs(5), 0));
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"postStart": {"exec": {"command": ["hook"]}}}},
            {"name": "b"},
        ]}));
        pod.advance_to(4).await;
        assert_eq!(pod.summary("a"), "waiting ContainerCreating");
        assert_eq!(pod.summary("b"), "waiting ContainerCreating");
        pod.advance_to(5).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["start", "exec"]), ["0 start a#0", "0 exec a hook", "5 start b#0"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failed_post_start_hook_kills_the_container() {
        let sim = SimulatedRuntime::new();
        sim.exec(|_, _| (Duration::from_secs(1), 7));
        let pod = TestPod::new(&sim, json!({"terminationGracePeriodSeconds": 4, "containers": [
            {"name": "a", "lifecycle": {"postStart": {"exec": {"command": ["hook", "x"]}}}},
        ]}));
        pod.advance_to(2).await;
        assert_eq!(pod.summary("a"), "waiting PostStartHookError (last Error 143) r1");
        let message = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some(
            "Exec lifecycle hook ([hook x]) for Container \"a\" in Pod \"p_ns(u)\" failed - \
             error: command 'hook x' exited with 7, message: \"output\""
        ));
        let events = pod.events("a");
        assert!(events.contains(&"FailedPostStartHook: PostStartHook failed".to_owned()));
        assert!(events.contains(&"Killing: FailedPostStartHook".to_owned()));
        pod.advance_to(5).await;
        assert_eq!(pod.summary("a"), "waiting CrashLoopBackOff (last Error 143) r1");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn pre_stop_counts_into_the_grace_period() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]);
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"sleep": {"seconds": 4}}}},
        ]}));
        pod.advance_to(1).await;
        pod.stop(10);
        pod.finished().await;
        assert_eq!(sim.log_of(&["signal"]), ["5 signal a 15", "11 signal a 9"]);
    }
}

lifecycle_test! {
    async fn grace_period_bounds_the_pre_stop_hook() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]);
        sim.exec(|_, _| (Duration::from_secs(100), 0));
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}},
        ]}));
        pod.advance_to(1).await;
        pod.stop(10);
        pod.finished().await;
        assert_eq!(sim.log_of(&["exec", "signal"]), ["1 exec a hook", "11 signal a 15", "13 signal a 9"]);
    }
}

lifecycle_test! {
    async fn failed_pre_stop_hook_is_reported() {
        let sim = SimulatedRuntime::new();
        sim.exec(|_, _| (Duration::ZERO, 1));
        let spec = json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}},
        ]});
        let pod = TestPod::new(&sim, spec.clone());
        pod.advance_to(1).await;
        pod.stop(10);
        pod.finished().await;
        assert!(pod.events("a").contains(&"FailedPreStopHook: PreStopHook failed".to_owned()));

        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, spec);
        pod.advance_to(1).await;
        pod.stop(0);
        pod.finished().await;
        assert!(sim.log_of(&["exec"]).is_empty());
    }
}

lifecycle_test! {
    async fn unreachable_http_hook_fails() {
        let sim = SimulatedRuntime::new().script("a", &[ExitsOnStop(0, 0)]);
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"postStart": {"httpGet": {"port": 80, "path": "/x"}}}},
        ]}));
        pod.advance_to(1).await;
        let message = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some(
            "HTTP lifecycle hook (/x) for Container \"a\" in Pod \"p_ns(u)\" failed - error: \
             Get \"http://10.0.0.7:80/x\": dial tcp 10.0.0.7:80: connect: connection refused"
        ));
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn spec_can_set_the_stop_signal() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "lifecycle": {"stopSignal": "SIGUSR1"}},
        ]}));
        pod.advance_to(1).await;
        assert_eq!(pod.status("a").stop_signal.as_deref(), Some("SIGUSR1"));
        pod.stop(10);
        pod.finished().await;
        assert_eq!(sim.log_of(&["signal"]), ["1 signal a 10"]);
    }
}
