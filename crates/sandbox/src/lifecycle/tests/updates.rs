//! Later bundles, and restarts of all containers.

use serde_json::{from_value, json};

use crate::lifecycle::simulated_runtime::{
    ScriptedRun, SimulatedRuntime, TestPod, bundle, with_problem,
};
use ScriptedRun::{Exits, ExitsOnStop};
use pod_protocol::{FailureCause, PodFailure, Stop};

lifecycle_test! {
    async fn image_change_restarts_despite_restart_policy() {
        let sim = SimulatedRuntime::new();
        let mut pod = TestPod::new(&sim, json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.update(|bundle| {
            bundle.pod.metadata.generation = Some(2);
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.containers[0].image = Some("other:1".to_owned());
        });
        let state = pod.advance_to(2).await;
        assert_eq!(state.observed_generation, Some(2));
        assert_eq!(pod.summary("a"), "running (last Error 143) r1 ready");
        assert_eq!(pod.status("a").image, "docker.io/library/other:1");
        assert!(pod.events("a").contains(
            &"Killing: Container a definition changed, will be restarted".to_owned()
        ));
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn status_shows_old_resources_until_resize_restart() {
        let sim = SimulatedRuntime::new().script("a", &[ExitsOnStop(5, 0)]).script("b", &[ExitsOnStop(5, 0)]);
        let resources = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let container = |name: &str, policy: &str| json!({"name": name, "resources": resources("1"),
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}]});
        let containers = [container("a", "RestartContainer"), container("b", "NotRequired")];
        let mut pod = TestPod::new(&sim, json!({"containers": containers}));
        pod.advance_to(1).await;
        pod.update(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            for container in &mut spec.containers {
                container.resources = from_value(resources("2")).expect("resources");
            }
        });
        let cpus = |pod: &TestPod, name: &str| {
            let status = pod.status(name);
            let has = status.resources.and_then(|has| has.requests).expect("requests");
            let given = status.allocated_resources.expect("requests");
            format!("{} of {}", has["cpu"].0, given["cpu"].0)
        };
        pod.advance_to(3).await;
        assert_eq!(cpus(&pod, "a"), "1 of 2");
        assert_eq!(cpus(&pod, "b"), "2 of 2");
        pod.advance_to(10).await;
        assert_eq!(cpus(&pod, "a"), "2 of 2");
        assert_eq!(pod.summary("a"), "running (last Completed 0) r1 ready");
        assert_eq!(pod.summary("b"), "running ready");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn changed_inputs_restart_nothing() {
        let sim = SimulatedRuntime::new();
        let mut pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.update(|bundle| {
            bundle.containers.insert("a".to_owned(), with_problem("CreateContainerConfigError", "gone"));
        });
        pod.advance_to(5).await;
        assert_eq!(sim.log_of(&["start", "signal"]), ["0 start a#0"]);
        assert_eq!(pod.summary("a"), "running ready");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn container_waits_for_missing_config() {
        let sim = SimulatedRuntime::new();
        let mut bundle = bundle(json!({"containers": [{"name": "a"}, {"name": "b"}]}));
        bundle.containers.insert(
            "a".to_owned(),
            with_problem("CreateContainerConfigError", "configmap \"c\" not found"),
        );
        let mut pod = TestPod::with_bundle(&sim, bundle);
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "waiting CreateContainerConfigError");
        assert_eq!(pod.summary("b"), "running ready");
        assert!(pod.events("a").contains(&"Failed: Error: configmap \"c\" not found".to_owned()));
        pod.update(|bundle| {
            bundle.containers.insert("a".to_owned(), with_problem("CreateContainerConfigError", "another"));
        });
        pod.advance_to(100).await;
        let message = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some("another"));
        pod.update(|bundle| bundle.containers.clear());
        pod.advance_to(101).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start b#0", "100 start a#0"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn ephemeral_containers_run_only_once() {
        let sim = SimulatedRuntime::new().script("e", &[Exits(3, 1)]);
        let mut pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.update(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.ephemeral_containers = Some(vec![
                from_value(json!({"name": "e", "image": "image:1", "targetContainerName": "a"})).expect("a container"),
            ]);
        });
        pod.advance_to(2).await;
        assert_eq!(pod.summary("e"), "running");
        pod.advance_to(60).await;
        assert_eq!(pod.summary("e"), "terminated Error 1");
        assert_eq!(sim.log_of(&["start"]), ["0 start a#0", "1 start e#0"]);
        assert!(pod.state().events.iter().any(
            |event| event.field_path.as_deref() == Some("spec.ephemeralContainers{e}")
        ));
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn exit_code_rule_restarts_all_containers() {
        let sim = SimulatedRuntime::new()
            .script("i", &[Exits(1, 0)])
            .script("a", &[Exits(4, 88), ExitsOnStop(0, 0)]);
        let pod = TestPod::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [
                {"name": "a", "restartPolicy": "Never", "restartPolicyRules": [
                    {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [88]}}]},
                {"name": "b"},
            ],
        }));
        pod.advance_to(10).await;
        assert_eq!(sim.log_of(&["start"]), [
            "0 start i#0", "1 start a#0", "1 start b#0", "5 start i#1", "6 start a#1", "6 start b#1",
        ]);
        assert_eq!(pod.summary("b"), "running (last Error 143) r1 ready");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn stop_with_failure_fails_the_pod() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        let failure = Some(PodFailure::new(FailureCause::NodePressure, "no room"));
        pod.lifecycle.stop(Stop { grace_seconds: 1, failure: failure.clone() });
        let state = pod.finished().await;
        assert_eq!(state.failure, failure);
    }
}

lifecycle_test! {
    async fn stop_before_pod_setup_starts_nothing() {
        let sim = SimulatedRuntime::new();
        sim.setup_failures.borrow_mut().extend(vec![("FailedCreatePodSandBox", "no network"); 10]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.stop(30);
        pod.finished().await;
        assert!(sim.log_of(&["start"]).is_empty());
    }
}

lifecycle_test! {
    async fn only_spec_or_volume_changes_retry_setup_early() {
        let sim = SimulatedRuntime::new();
        sim.setup_failures.borrow_mut().extend(vec![("FailedMount", "no volume"); 5]);
        let mut pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(8).await;
        pod.update(|bundle| bundle.pod.metadata.resource_version = Some("2".to_owned()));
        pod.advance_to(9).await;
        pod.update(|bundle| {
            bundle.volumes.insert("v".to_owned(), json!({}));
        });
        pod.advance_to(10).await;
        assert_eq!(sim.log_of(&["set up"]), ["0 set up", "1 set up", "3 set up", "7 set up", "9 set up"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn state_is_published_only_on_change() {
        let sim = SimulatedRuntime::new();
        let mut pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        let mut state = pod.lifecycle.state();
        state.mark_unchanged();
        pod.update(|_| {});
        pod.advance_to(50).await;
        assert!(!state.has_changed().expect("a running driver"));
        pod.stop(1);
        pod.finished().await;
    }
}
