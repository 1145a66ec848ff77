//! What probes do to a pod's life.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod};
use Script::{StopsOnSignal, IgnoresSignals};

/// Commands that fail in these seconds of a pod's life.
fn sick(runtime: &Rc<SimulatedRuntime>, when: impl Fn(u64) -> bool + 'static) {
    let clock = Rc::downgrade(runtime);
    runtime.exec(move |_, _| {
        let now = clock.upgrade().map_or(0, |runtime| runtime.now());
        (Duration::ZERO, i32::from(when(now)))
    });
}

pod_test! {
    async fn readiness_comes_and_goes() {
        let runtime = SimulatedRuntime::new();
        sick(&runtime, |now| !(5..20).contains(&now));
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a", "readinessProbe": {
            "exec": {"command": ["ready"]}, "initialDelaySeconds": 2, "periodSeconds": 2,
            "failureThreshold": 3, "successThreshold": 2}}]}));
        pod.at(3).await;
        assert_eq!(pod.summary("a"), "running");
        assert_eq!(pod.status("a").started, Some(true));
        // Well at 6 and 8.
        pod.at(7).await;
        assert_eq!(pod.summary("a"), "running");
        pod.at(8).await;
        assert_eq!(pod.summary("a"), "running ready");
        // Not well at 20, 22 and 24.
        pod.at(23).await;
        assert_eq!(pod.summary("a"), "running ready");
        pod.at(24).await;
        assert_eq!(pod.summary("a"), "running");
        assert!(pod.events("a").contains(&"Unhealthy: Readiness probe failed: what it said".to_owned()));
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_dead_container_is_restarted() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals, StopsOnSignal(0, 0)]);
        sick(&runtime, |now| (10..20).contains(&now));
        let pod = TestPod::new(&runtime, json!({
            "terminationGracePeriodSeconds": 30,
            "restartPolicy": "OnFailure",
            "containers": [{"name": "a", "livenessProbe": {
                "exec": {"command": ["live"]}, "periodSeconds": 5, "failureThreshold": 2,
                "terminationGracePeriodSeconds": 7}}]}));
        pod.at(30).await;
        assert_eq!(runtime.log_of(&["start", "signal"]), ["0 start a#0", "15 signal a 15", "22 signal a 9", "22 start a#1"]);
        assert_eq!(pod.summary("a"), "running (last Error 137) r1 ready");
        assert!(pod.events("a").contains(
            &"Killing: Container a failed liveness probe, will be restarted".to_owned()
        ));
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_dead_container_that_ends_well_is_restarted_on_failure() {
        let runtime = SimulatedRuntime::new().script("a", &[StopsOnSignal(0, 0)]);
        sick(&runtime, |now| now < 1);
        let pod = TestPod::new(&runtime, json!({
            "restartPolicy": "OnFailure",
            "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 1}}]}));
        pod.at(3).await;
        assert_eq!(runtime.log_of(&["start"]), ["0 start a#0", "0 start a#1"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_dead_container_of_a_pod_that_is_never_restarted_ends_it() {
        let runtime = SimulatedRuntime::new();
        sick(&runtime, |now| now < 100);
        let pod = TestPod::new(&runtime, json!({
            "restartPolicy": "Never",
            "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 1}}]}));
        pod.finish().await;
        assert_eq!(pod.summary("a"), "ended Error 143");
        assert!(pod.events("a").contains(&"Killing: Container a failed liveness probe".to_owned()));
    }
}

pod_test! {
    async fn nothing_else_is_asked_before_a_container_is_up() {
        let asked = Rc::new(RefCell::new(Vec::new()));
        let runtime = SimulatedRuntime::new();
        let (log, clock) = (asked.clone(), Rc::downgrade(&runtime));
        runtime.exec(move |_, command| {
            let now = clock.upgrade().map_or(0, |runtime| runtime.now());
            log.borrow_mut().push(format!("{now} {}", command[0]));
            (Duration::ZERO, i32::from(command[0] == "up" && now < 6))
        });
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 3, "failureThreshold": 5},
            "livenessProbe": {"exec": {"command": ["live"]}, "periodSeconds": 5},
            "readinessProbe": {"exec": {"command": ["ready"]}, "periodSeconds": 5},
        }]}));
        pod.at(4).await;
        assert_eq!(pod.status("a").started, Some(false));
        pod.at(7).await;
        assert_eq!(pod.summary("a"), "running ready");
        pod.at(12).await;
        assert_eq!(*asked.borrow(), ["0 up", "3 up", "6 up", "6 live", "6 ready", "11 live", "11 ready"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_container_that_never_comes_up_is_restarted() {
        let runtime = SimulatedRuntime::new();
        sick(&runtime, |now| now < 7);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 3, "failureThreshold": 3}}]}));
        pod.at(8).await;
        assert_eq!(runtime.log_of(&["start", "signal"]), ["0 start a#0", "6 signal a 15", "6 start a#1"]);
        assert!(pod.events("a").contains(
            &"Killing: Container a failed startup probe, will be restarted".to_owned()
        ));
        pod.at(10).await;
        assert_eq!(pod.summary("a"), "running (last Error 143) r1 ready");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_slow_answer_is_a_failure() {
        let runtime = SimulatedRuntime::new();
        runtime.exec(|_, _| (Duration::from_secs(10), 0));
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a",
            "readinessProbe": {"exec": {"command": ["x", "y"]}, "timeoutSeconds": 2, "periodSeconds": 5}}]}));
        pod.at(3).await;
        assert!(pod.events("a").contains(
            &"Unhealthy: Readiness probe failed: command timed out: \"x y\" timed out after 2s".to_owned()
        ));
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn readiness_is_asked_until_the_end_but_liveness_is_not() {
        let asked = Rc::new(RefCell::new(Vec::new()));
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]);
        let (log, clock) = (asked.clone(), Rc::downgrade(&runtime));
        runtime.exec(move |_, command| {
            let now = clock.upgrade().map_or(0, |runtime| runtime.now());
            log.borrow_mut().push(format!("{now} {}", command[0]));
            (Duration::ZERO, i32::from(now > 5))
        });
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a",
            "livenessProbe": {"exec": {"command": ["live"]}, "periodSeconds": 5, "failureThreshold": 1},
            "readinessProbe": {"exec": {"command": ["ready"]}, "periodSeconds": 5, "failureThreshold": 1},
        }]}));
        pod.at(2).await;
        pod.stop(11);
        pod.at(11).await;
        assert_eq!(*asked.borrow(), ["0 live", "0 ready", "5 ready", "10 ready"]);
        assert_eq!(pod.summary("a"), "running");
        pod.finish().await;
    }
}

pod_test! {
    async fn a_probe_without_a_way_to_ask_is_told() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a", "livenessProbe": {"periodSeconds": -3}}]}));
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert!(pod.events("a").contains(
            &"Unhealthy: Liveness probe errored and resulted in unknown state: missing probe handler for a".to_owned()
        ));
        pod.stop(1);
        pod.finish().await;
    }
}
