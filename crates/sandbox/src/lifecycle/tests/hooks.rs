//! postStart, preStop and stop signals.

use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod};
use Script::{StopsOnSignal, IgnoresSignals};

pod_test! {
    async fn a_container_is_not_running_before_its_post_start_hook_is_done() {
        let runtime = SimulatedRuntime::new();
        runtime.exec(|_, _| (Duration::from_secs(5), 0));
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "lifecycle": {"postStart": {"exec": {"command": ["hook"]}}}},
            {"name": "b"},
        ]}));
        pod.at(4).await;
        assert_eq!(pod.summary("a"), "waiting ContainerCreating");
        assert_eq!(pod.summary("b"), "waiting ContainerCreating");
        pod.at(5).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["start", "exec"]), ["0 start a#0", "0 exec a hook", "5 start b#0"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_failed_post_start_hook_ends_the_container() {
        let runtime = SimulatedRuntime::new();
        runtime.exec(|_, _| (Duration::from_secs(1), 7));
        let pod = TestPod::new(&runtime, json!({"terminationGracePeriodSeconds": 4, "containers": [
            {"name": "a", "lifecycle": {"postStart": {"exec": {"command": ["hook", "x"]}}}},
        ]}));
        pod.at(2).await;
        assert_eq!(pod.summary("a"), "waiting PostStartHookError (last Error 143) r1");
        let message = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some(
            "Exec lifecycle hook ([hook x]) for Container \"a\" in Pod \"p_ns(u)\" failed - \
             error: command 'hook x' exited with 7, message: \"what it said\""
        ));
        let events = pod.events("a");
        assert!(events.contains(&"FailedPostStartHook: PostStartHook failed".to_owned()));
        assert!(events.contains(&"Killing: FailedPostStartHook".to_owned()));
        pod.at(5).await;
        assert_eq!(pod.summary("a"), "waiting CrashLoopBackOff (last Error 143) r1");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn pre_stop_counts_into_the_grace_period() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]);
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"sleep": {"seconds": 4}}}},
        ]}));
        pod.at(1).await;
        pod.stop(10);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["signal"]), ["5 signal a 15", "11 signal a 9"]);
    }
}

pod_test! {
    async fn a_long_pre_stop_hook_is_cut_short() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]);
        runtime.exec(|_, _| (Duration::from_secs(100), 0));
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}},
        ]}));
        pod.at(1).await;
        pod.stop(10);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["exec", "signal"]), ["1 exec a hook", "11 signal a 15", "13 signal a 9"]);
    }
}

pod_test! {
    async fn a_failed_pre_stop_hook_is_told_and_no_grace_means_none() {
        let runtime = SimulatedRuntime::new();
        runtime.exec(|_, _| (Duration::ZERO, 1));
        let spec = json!({"containers": [
            {"name": "a", "lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}},
        ]});
        let pod = TestPod::new(&runtime, spec.clone());
        pod.at(1).await;
        pod.stop(10);
        pod.finish().await;
        assert!(pod.events("a").contains(&"FailedPreStopHook: PreStopHook failed".to_owned()));

        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, spec);
        pod.at(1).await;
        pod.stop(0);
        pod.finish().await;
        assert!(runtime.log_of(&["exec"]).is_empty());
    }
}

pod_test! {
    async fn an_unreachable_http_hook_fails() {
        let runtime = SimulatedRuntime::new().script("a", &[StopsOnSignal(0, 0)]);
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "lifecycle": {"postStart": {"httpGet": {"port": 80, "path": "/x"}}}},
        ]}));
        pod.at(1).await;
        let message = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some(
            "HTTP lifecycle hook (/x) for Container \"a\" in Pod \"p_ns(u)\" failed - error: \
             Get \"http://10.0.0.7:80/x\": dial tcp 10.0.0.7:80: connect: connection refused"
        ));
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn the_spec_can_name_the_stop_signal() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "lifecycle": {"stopSignal": "SIGUSR1"}},
        ]}));
        pod.at(1).await;
        assert_eq!(pod.status("a").stop_signal.as_deref(), Some("SIGUSR1"));
        pod.stop(10);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["signal"]), ["1 signal a 10"]);
    }
}
