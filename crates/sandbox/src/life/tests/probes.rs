//! Effects of probes on a pod.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use serde_json::json;

use crate::life::sim::{Script, Sim, World};
use Script::{Obeys, Stubborn};

/// Makes commands fail in these seconds of the test.
fn sick(sim: &Rc<Sim>, when: impl Fn(u64) -> bool + 'static) {
    let clock = Rc::downgrade(sim);
    sim.exec(move |_, _| {
        let now = clock.upgrade().map_or(0, |sim| sim.now());
        (Duration::ZERO, i32::from(when(now)))
    });
}

life! {
    async fn readiness_follows_the_probe_thresholds() {
        let sim = Sim::new();
        sick(&sim, |now| !(5..20).contains(&now));
        let world = World::new(&sim, json!({"containers": [{"name": "a", "readinessProbe": {
            "exec": {"command": ["ready"]}, "initialDelaySeconds": 2, "periodSeconds": 2,
            "failureThreshold": 3, "successThreshold": 2}}]}));
        world.at(3).await;
        assert_eq!(world.word("a"), "running");
        assert_eq!(world.status("a").started, Some(true));
        // The probe succeeds at 6 and 8.
        world.at(7).await;
        assert_eq!(world.word("a"), "running");
        world.at(8).await;
        assert_eq!(world.word("a"), "running ready");
        // The probe fails at 20, 22 and 24.
        world.at(23).await;
        assert_eq!(world.word("a"), "running ready");
        world.at(24).await;
        assert_eq!(world.word("a"), "running");
        assert!(world.events("a").contains(&"Unhealthy: Readiness probe failed: what it said".to_owned()));
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failed_liveness_probe_restarts_the_container() {
        let sim = Sim::new().script("a", &[Stubborn, Obeys(0, 0)]);
        sick(&sim, |now| (10..20).contains(&now));
        let world = World::new(&sim, json!({
            "terminationGracePeriodSeconds": 30,
            "restartPolicy": "OnFailure",
            "containers": [{"name": "a", "livenessProbe": {
                "exec": {"command": ["live"]}, "periodSeconds": 5, "failureThreshold": 2,
                "terminationGracePeriodSeconds": 7}}]}));
        world.at(30).await;
        assert_eq!(sim.log_of(&["start", "signal"]), ["0 start a#0", "15 signal a 15", "22 signal a 9", "22 start a#1"]);
        assert_eq!(world.word("a"), "running (last Error 137) r1 ready");
        assert!(world.events("a").contains(
            &"Killing: Container a failed liveness probe, will be restarted".to_owned()
        ));
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn liveness_kill_restarts_despite_exit_code_zero() {
        let sim = Sim::new().script("a", &[Obeys(0, 0)]);
        sick(&sim, |now| now < 1);
        let world = World::new(&sim, json!({
            "restartPolicy": "OnFailure",
            "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 1}}]}));
        world.at(3).await;
        assert_eq!(sim.log_of(&["start"]), ["0 start a#0", "0 start a#1"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failed_liveness_probe_ends_never_restarted_pod() {
        let sim = Sim::new();
        sick(&sim, |now| now < 100);
        let world = World::new(&sim, json!({
            "restartPolicy": "Never",
            "containers": [{"name": "a", "livenessProbe": {"exec": {"command": ["live"]}, "failureThreshold": 1}}]}));
        world.finish().await;
        assert_eq!(world.word("a"), "ended Error 143");
        assert!(world.events("a").contains(&"Killing: Container a failed liveness probe".to_owned()));
    }
}

life! {
    async fn other_probes_wait_for_the_startup_probe() {
        let asked = Rc::new(RefCell::new(Vec::new()));
        let sim = Sim::new();
        let (log, clock) = (asked.clone(), Rc::downgrade(&sim));
        sim.exec(move |_, command| {
            let now = clock.upgrade().map_or(0, |sim| sim.now());
            log.borrow_mut().push(format!("{now} {}", command[0]));
            (Duration::ZERO, i32::from(command[0] == "up" && now < 6))
        });
        let world = World::new(&sim, json!({"containers": [{"name": "a",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 3, "failureThreshold": 5},
            "livenessProbe": {"exec": {"command": ["live"]}, "periodSeconds": 5},
            "readinessProbe": {"exec": {"command": ["ready"]}, "periodSeconds": 5},
        }]}));
        world.at(4).await;
        assert_eq!(world.status("a").started, Some(false));
        world.at(7).await;
        assert_eq!(world.word("a"), "running ready");
        world.at(12).await;
        assert_eq!(*asked.borrow(), ["0 up", "3 up", "6 up", "6 live", "6 ready", "11 live", "11 ready"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failed_startup_probe_restarts_the_container() {
        let sim = Sim::new();
        sick(&sim, |now| now < 7);
        let world = World::new(&sim, json!({"containers": [{"name": "a",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 3, "failureThreshold": 3}}]}));
        world.at(8).await;
        assert_eq!(sim.log_of(&["start", "signal"]), ["0 start a#0", "6 signal a 15", "6 start a#1"]);
        assert!(world.events("a").contains(
            &"Killing: Container a failed startup probe, will be restarted".to_owned()
        ));
        world.at(10).await;
        assert_eq!(world.word("a"), "running (last Error 143) r1 ready");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn probe_timeout_is_a_failure() {
        let sim = Sim::new();
        sim.exec(|_, _| (Duration::from_secs(10), 0));
        let world = World::new(&sim, json!({"containers": [{"name": "a",
            "readinessProbe": {"exec": {"command": ["x", "y"]}, "timeoutSeconds": 2, "periodSeconds": 5}}]}));
        world.at(3).await;
        assert!(world.events("a").contains(
            &"Unhealthy: Readiness probe failed: command timed out: \"x y\" timed out after 2s".to_owned()
        ));
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn only_the_readiness_probe_continues_while_stopping() {
        let asked = Rc::new(RefCell::new(Vec::new()));
        let sim = Sim::new().script("a", &[Stubborn]);
        let (log, clock) = (asked.clone(), Rc::downgrade(&sim));
        sim.exec(move |_, command| {
            let now = clock.upgrade().map_or(0, |sim| sim.now());
            log.borrow_mut().push(format!("{now} {}", command[0]));
            (Duration::ZERO, i32::from(now > 5))
        });
        let world = World::new(&sim, json!({"containers": [{"name": "a",
            "livenessProbe": {"exec": {"command": ["live"]}, "periodSeconds": 5, "failureThreshold": 1},
            "readinessProbe": {"exec": {"command": ["ready"]}, "periodSeconds": 5, "failureThreshold": 1},
        }]}));
        world.at(2).await;
        world.stop(11);
        world.at(11).await;
        assert_eq!(*asked.borrow(), ["0 live", "0 ready", "5 ready", "10 ready"]);
        assert_eq!(world.word("a"), "running");
        world.finish().await;
    }
}

life! {
    async fn probe_without_handler_is_reported() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"containers": [{"name": "a", "livenessProbe": {"periodSeconds": -3}}]}));
        world.at(1).await;
        assert_eq!(world.word("a"), "running ready");
        assert!(world.events("a").contains(
            &"Unhealthy: Liveness probe errored and resulted in unknown state: missing probe handler for a".to_owned()
        ));
        world.stop(1);
        world.finish().await;
    }
}
