//! Bundles that come later, and restarts of everything.

use serde_json::{from_value, json};

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod, bundle, with_problem};
use Script::{Exits, StopsOnSignal};
use pod_protocol::{Problem, Stop};

pod_test! {
    async fn another_image_restarts_a_container_whatever_its_policy() {
        let runtime = SimulatedRuntime::new();
        let mut pod = TestPod::new(&runtime, json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.change(|bundle| {
            bundle.pod.metadata.generation = Some(2);
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.containers[0].image = Some("other:1".to_owned());
        });
        let state = pod.at(2).await;
        assert_eq!(state.observed_generation, Some(2));
        assert_eq!(pod.summary("a"), "running (last Error 143) r1 ready");
        assert_eq!(pod.status("a").image, "docker.io/library/other:1");
        assert!(pod.events("a").contains(
            &"Killing: Container a definition changed, will be restarted".to_owned()
        ));
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn who_is_restarted_for_other_resources_has_the_old_ones_until_then() {
        let runtime = SimulatedRuntime::new().script("a", &[StopsOnSignal(5, 0)]).script("b", &[StopsOnSignal(5, 0)]);
        let resources = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let container = |name: &str, policy: &str| json!({"name": name, "resources": resources("1"),
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}]});
        let containers = [container("a", "RestartContainer"), container("b", "NotRequired")];
        let mut pod = TestPod::new(&runtime, json!({"containers": containers}));
        pod.at(1).await;
        pod.change(|bundle| {
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
        pod.at(3).await;
        assert_eq!(cpus(&pod, "a"), "1 of 2");
        assert_eq!(cpus(&pod, "b"), "2 of 2");
        pod.at(10).await;
        assert_eq!(cpus(&pod, "a"), "2 of 2");
        assert_eq!(pod.summary("a"), "running (last Completed 0) r1 ready");
        assert_eq!(pod.summary("b"), "running ready");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn other_inputs_restart_nothing() {
        let runtime = SimulatedRuntime::new();
        let mut pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.change(|bundle| {
            bundle.containers.insert("a".to_owned(), with_problem("CreateContainerConfigError", "gone"));
        });
        pod.at(5).await;
        assert_eq!(runtime.log_of(&["start", "signal"]), ["0 start a#0"]);
        assert_eq!(pod.summary("a"), "running ready");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn what_is_missing_is_waited_for() {
        let runtime = SimulatedRuntime::new();
        let mut bundle = bundle(json!({"containers": [{"name": "a"}, {"name": "b"}]}));
        bundle.containers.insert(
            "a".to_owned(),
            with_problem("CreateContainerConfigError", "configmap \"c\" not found"),
        );
        let mut pod = TestPod::with(&runtime, bundle);
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "waiting CreateContainerConfigError");
        assert_eq!(pod.summary("b"), "running ready");
        assert!(pod.events("a").contains(&"Failed: Error: configmap \"c\" not found".to_owned()));
        pod.change(|bundle| {
            bundle.containers.insert("a".to_owned(), with_problem("CreateContainerConfigError", "another"));
        });
        pod.at(100).await;
        let message = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some("another"));
        pod.change(|bundle| bundle.containers.clear());
        pod.at(101).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["start"]), ["0 start b#0", "100 start a#0"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn ephemeral_containers_come_later_and_only_once() {
        let runtime = SimulatedRuntime::new().script("e", &[Exits(3, 1)]);
        let mut pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.change(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.ephemeral_containers = Some(vec![
                from_value(json!({"name": "e", "image": "image:1", "targetContainerName": "a"})).expect("a container"),
            ]);
        });
        pod.at(2).await;
        assert_eq!(pod.summary("e"), "running");
        pod.at(60).await;
        assert_eq!(pod.summary("e"), "ended Error 1");
        assert_eq!(runtime.log_of(&["start"]), ["0 start a#0", "1 start e#0"]);
        assert!(pod.state().events.iter().any(
            |event| event.field_path.as_deref() == Some("spec.ephemeralContainers{e}")
        ));
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_rule_restarts_all_containers() {
        let runtime = SimulatedRuntime::new()
            .script("i", &[Exits(1, 0)])
            .script("a", &[Exits(4, 88), StopsOnSignal(0, 0)]);
        let pod = TestPod::new(&runtime, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [
                {"name": "a", "restartPolicy": "Never", "restartPolicyRules": [
                    {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [88]}}]},
                {"name": "b"},
            ],
        }));
        pod.at(10).await;
        assert_eq!(runtime.log_of(&["start"]), [
            "0 start i#0", "1 start a#0", "1 start b#0", "5 start i#1", "6 start a#1", "6 start b#1",
        ]);
        assert_eq!(pod.summary("b"), "running (last Error 143) r1 ready");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_reason_for_the_end_is_kept() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        let failure = Some(Problem { reason: "Evicted".to_owned(), message: "no room".to_owned() });
        pod.lifecycle.stop(Stop { grace_seconds: 1, failure: failure.clone() });
        let state = pod.finish().await;
        assert_eq!(state.failure, failure);
    }
}

pod_test! {
    async fn a_stop_before_anything_is_up() {
        let runtime = SimulatedRuntime::new();
        runtime.ups.borrow_mut().extend(vec![("", "no network"); 10]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.stop(30);
        pod.finish().await;
        assert!(runtime.log_of(&["start"]).is_empty());
    }
}

pod_test! {
    async fn only_news_end_the_wait_for_the_pod_to_come_up() {
        let runtime = SimulatedRuntime::new();
        runtime.ups.borrow_mut().extend(vec![("FailedMount", "no volume"); 5]);
        let mut pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(8).await;
        pod.change(|bundle| bundle.pod.metadata.resource_version = Some("2".to_owned()));
        pod.at(9).await;
        pod.change(|bundle| {
            bundle.volumes.insert("v".to_owned(), json!({}));
        });
        pod.at(10).await;
        assert_eq!(runtime.log_of(&["up"]), ["0 up", "1 up", "3 up", "7 up", "9 up"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn states_are_published_only_when_they_differ() {
        let runtime = SimulatedRuntime::new();
        let mut pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        let mut state = pod.lifecycle.state();
        state.mark_unchanged();
        pod.change(|_| {});
        pod.at(50).await;
        assert!(!state.has_changed().expect("the life goes on"));
        pod.stop(1);
        pod.finish().await;
    }
}
