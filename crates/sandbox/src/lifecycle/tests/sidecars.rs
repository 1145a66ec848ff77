//! Native sidecars, and the order in which a pod ends.

use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod};
use Script::{Exits, StopsOnSignal, IgnoresSignals};

pod_test! {
    async fn sidecars_start_in_order_and_end_last_in_reverse() {
        let runtime = SimulatedRuntime::new()
            .script("s", &[StopsOnSignal(1, 0)])
            .script("t", &[StopsOnSignal(1, 0)])
            .script("i", &[Exits(2, 0)])
            .script("a", &[StopsOnSignal(3, 0)]);
        let pod = TestPod::new(&runtime, json!({
            "initContainers": [
                {"name": "s", "restartPolicy": "Always"},
                {"name": "i"},
                {"name": "t", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "a"}],
        }));
        pod.at(3).await;
        assert_eq!(pod.summary("s"), "running ready");
        assert_eq!(pod.summary("a"), "running ready");
        pod.stop(30);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["start", "signal", "exit"]), [
            "0 start s#0", "0 start i#0", "2 exit i 0", "2 start t#0", "2 start a#0",
            "3 signal a 15", "6 exit a 0", "6 signal t 15", "7 exit t 0", "7 signal s 15", "8 exit s 0",
        ]);
    }
}

pod_test! {
    async fn sidecars_end_when_the_work_is_done() {
        let runtime = SimulatedRuntime::new().script("a", &[Exits(5, 0)]).script("s", &[StopsOnSignal(0, 0)]);
        let pod = TestPod::new(&runtime, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        pod.finish().await;
        assert_eq!(runtime.now(), 5);
        assert_eq!(pod.summary("s"), "ended Completed 0");
        assert_eq!(pod.summary("a"), "ended Completed 0");
    }
}

pod_test! {
    async fn sidecars_are_restarted_even_where_others_are_not() {
        let runtime = SimulatedRuntime::new().script("s", &[Exits(3, 0), StopsOnSignal(0, 0)]);
        let pod = TestPod::new(&runtime, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        pod.at(4).await;
        assert_eq!(pod.summary("s"), "running (last Completed 0) r1 ready");
        assert_eq!(runtime.log_of(&["start"]), ["0 start s#0", "0 start a#0", "3 start s#1"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_startup_probe_holds_up_those_after_a_sidecar() {
        let runtime = SimulatedRuntime::new();
        let clock = std::rc::Rc::downgrade(&runtime);
        runtime.exec(move |_, _| {
            let up = clock.upgrade().is_some_and(|runtime| runtime.now() >= 6);
            (Duration::ZERO, i32::from(!up))
        });
        let pod = TestPod::new(&runtime, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always", "startupProbe":
                {"exec": {"command": ["up"]}, "periodSeconds": 2, "failureThreshold": 10}}],
            "containers": [{"name": "a"}],
        }));
        pod.at(5).await;
        assert_eq!(pod.summary("s"), "running");
        assert_eq!(pod.status("s").started, Some(false));
        assert_eq!(pod.summary("a"), "waiting PodInitializing");
        pod.at(7).await;
        assert_eq!(pod.summary("s"), "running ready");
        assert_eq!(runtime.log_of(&["start"]), ["0 start s#0", "6 start a#0"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn patience_is_shared_by_all() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]).script("s", &[IgnoresSignals]);
        let pod = TestPod::new(&runtime, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}],
        }));
        pod.at(1).await;
        pod.stop(10);
        pod.finish().await;
        // The sidecar's turn comes at the latest when patience ends, and then it has its two seconds.
        assert_eq!(runtime.log_of(&["signal"]), [
            "1 signal a 15", "11 signal s 15", "11 signal a 9", "13 signal s 9",
        ]);
    }
}

pod_test! {
    async fn a_crash_of_an_init_container_leaves_earlier_sidecars_alone() {
        let runtime = SimulatedRuntime::new().script("i", &[Exits(1, 1), Exits(1, 0)]);
        let pod = TestPod::new(&runtime, json!({
            "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        pod.at(3).await;
        assert_eq!(runtime.log_of(&["start"]), ["0 start s#0", "0 start i#0", "1 start i#1", "2 start a#0"]);
        pod.stop(1);
        pod.finish().await;
    }
}
