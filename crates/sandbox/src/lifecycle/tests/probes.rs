//! Effects of probes on a pod.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{ScriptedRun, SimulatedRuntime, TestPod};
use ScriptedRun::{ExitsOnStop, IgnoresStop};

/// Makes commands fail in the seconds of the test for which `fails` returns true.
fn fail_commands(sim: &Rc<SimulatedRuntime>, fails: impl Fn(u64) -> bool + 'static) {
    let clock = Rc::downgrade(sim);
    sim.exec(move |_, _| {
        let now = clock.upgrade().map_or(0, |sim| sim.now());
        (Duration::ZERO, i32::from(fails(now)))
    });
}

lifecycle_test! {
    async fn readiness_follows_the_probe_thresholds() {
        let sim = SimulatedRuntime::new();
        fail_commands(&sim, |now| !(5..20).contains(&now));
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a", "readinessProbe": {
            "exec": {"command": ["ready"]}, "initialDelaySeconds": 2, "periodSeconds": 2,
            "failureThreshold": 3, "successThreshold": 2}}]}));
        pod.advance_to(3).await;
        assert_eq!(pod.summary("a"), "running");
        assert_eq!(pod.status("a").started, Some(true));
        // The probe succeeds at 6 and 8.
        pod.advance_to(7).await;
        assert_eq!(pod.summary("a"), "running");
        pod.advance_to(8).await;
        assert_eq!(pod.summary("a"), "running ready");
        // The probe fails at 20, 22 and 24.
        pod.advance_to(23).await;
        assert_eq!(pod.summary("a"), "running ready");
        pod.advance_to(24).await;
        assert_eq!(pod.summary("a"), "running");
        assert!(pod.events("a").contains(&"Unhealthy: Readiness probe failed: output".to_owned()));
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failed_liveness_probe_restarts_the_container() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop, ExitsOnStop(0, 0)]);
        fail_commands(&sim, |now| (10..20).contains(&now));
        let pod = TestPod::new(&sim, json!({
            "terminationGracePeriodSeconds": 30,
            "restartPolicy": "OnFailure",
            "containers": [{"name": "a", "livenessProbe": {
                "exec": {"command": ["live"]}, "periodSeconds": 5, "failureThreshold": 2,
                "terminationGracePeriodSeconds": 7}}]}));
        pod.advance_to(30).await;
        assert_eq!(sim.log_of(&["start", "signal"]), ["0 start a#0", "15 signal a 15", "22 signal a 9", "22 start a#1"]);
        assert_eq!(pod.summary("a"), "running (last Error 137) r1 ready");
        assert!(pod.events("a").contains(
            &"Killing: Container a failed liveness probe, will be restarted".to_owned()
        ));
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn liveness_kill_restarts_despite_exit_code_zero() {
        let sim = SimulatedRuntime::new().script("a", &[ExitsOnStop(0, 0)]);
        fail_commands(&sim, |now| now < 1);
        let pod = TestPod::new(&sim, json!({
            "restartPolicy": "OnFailure",
            "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 1}}]}));
        pod.advance_to(3).await;
        assert_eq!(sim.log_of(&["start"]), ["0 start a#0", "0 start a#1"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failed_liveness_probe_ends_never_restarted_pod() {
        let sim = SimulatedRuntime::new();
        fail_commands(&sim, |now| now < 100);
        let pod = TestPod::new(&sim, json!({
            "restartPolicy": "Never",
            "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 1}}]}));
        pod.finished().await;
        assert_eq!(pod.summary("a"), "terminated Error 143");
        assert!(pod.events("a").contains(&"Killing: Container a failed liveness probe".to_owned()));
    }
}

lifecycle_test! {
    async fn other_probes_wait_for_the_startup_probe() {
        let commands = Rc::new(RefCell::new(Vec::new()));
        let sim = SimulatedRuntime::new();
        let (log, clock) = (commands.clone(), Rc::downgrade(&sim));
        sim.exec(move |_, command| {
            let now = clock.upgrade().map_or(0, |sim| sim.now());
            log.borrow_mut().push(format!("{now} {}", command[0]));
            (Duration::ZERO, i32::from(command[0] == "up" && now < 6))
        });
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 3, "failureThreshold": 5},
            "livenessProbe": {"exec": {"command": ["live"]}, "periodSeconds": 5},
            "readinessProbe": {"exec": {"command": ["ready"]}, "periodSeconds": 5},
        }]}));
        pod.advance_to(4).await;
        assert_eq!(pod.status("a").started, Some(false));
        pod.advance_to(7).await;
        assert_eq!(pod.summary("a"), "running ready");
        pod.advance_to(12).await;
        assert_eq!(*commands.borrow(), ["0 up", "3 up", "6 up", "6 live", "6 ready", "11 live", "11 ready"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failed_startup_probe_restarts_the_container() {
        let sim = SimulatedRuntime::new();
        fail_commands(&sim, |now| now < 7);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 3, "failureThreshold": 3}}]}));
        pod.advance_to(8).await;
        assert_eq!(sim.log_of(&["start", "signal"]), ["0 start a#0", "6 signal a 15", "6 start a#1"]);
        assert!(pod.events("a").contains(
            &"Killing: Container a failed startup probe, will be restarted".to_owned()
        ));
        pod.advance_to(10).await;
        assert_eq!(pod.summary("a"), "running (last Error 143) r1 ready");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn probe_timeout_is_a_failure() {
        let sim = SimulatedRuntime::new();
        sim.exec(|_, _| (Duration::from_secs(10), 0));
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a",
            "readinessProbe": {"exec": {"command": ["x", "y"]}, "timeoutSeconds": 2, "periodSeconds": 5}}]}));
        pod.advance_to(3).await;
        assert!(pod.events("a").contains(
            &"Unhealthy: Readiness probe failed: command timed out: \"x y\" timed out after 2s".to_owned()
        ));
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn only_the_readiness_probe_continues_while_stopping() {
        let commands = Rc::new(RefCell::new(Vec::new()));
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]);
        let (log, clock) = (commands.clone(), Rc::downgrade(&sim));
        sim.exec(move |_, command| {
            let now = clock.upgrade().map_or(0, |sim| sim.now());
            log.borrow_mut().push(format!("{now} {}", command[0]));
            (Duration::ZERO, i32::from(now > 5))
        });
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a",
            "livenessProbe": {"exec": {"command": ["live"]}, "periodSeconds": 5, "failureThreshold": 1},
            "readinessProbe": {"exec": {"command": ["ready"]}, "periodSeconds": 5, "failureThreshold": 1},
        }]}));
        pod.advance_to(2).await;
        pod.stop(11);
        pod.advance_to(11).await;
        assert_eq!(*commands.borrow(), ["0 live", "0 ready", "5 ready", "10 ready"]);
        assert_eq!(pod.summary("a"), "running");
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn probe_without_handler_is_reported() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a", "livenessProbe": {"periodSeconds": -3}}]}));
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert!(pod.events("a").contains(
            &"Unhealthy: Liveness probe errored and resulted in unknown state: missing probe handler for a".to_owned()
        ));
        pod.stop(1);
        pod.finished().await;
    }
}
