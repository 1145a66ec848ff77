//! Image pulls.

use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{SimulatedRuntime, TestPod};

lifecycle_test! {
    async fn failing_pull_backs_off() {
        let sim = SimulatedRuntime::new();
        sim.pull_failures.borrow_mut().extend(vec![("ErrImagePull", "denied"); 3]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "waiting ErrImagePull");
        pod.advance_to(3).await;
        assert_eq!(pod.summary("a"), "waiting ImagePullBackOff");
        let waiting = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(waiting.as_deref(), Some("Back-off pulling image \"image:1\": ErrImagePull: denied"));
        pod.advance_to(11).await;
        assert_eq!(pod.summary("a"), "waiting ErrImagePull");
        pod.advance_to(100).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["pull"]), [
            "0 pull image:1", "10 pull image:1", "30 pull image:1", "70 pull image:1",
        ]);
        assert_eq!(pod.events("a")[..5], [
            "Pulling: Pulling image \"image:1\"",
            "Failed: Failed to pull image \"image:1\": denied",
            "Failed: Error: ErrImagePull",
            "BackOff: Back-off pulling image \"image:1\"",
            "Failed: Error: ImagePullBackOff",
        ]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failing_image_volume_blocks_only_its_container() {
        let sim = SimulatedRuntime::new();
        sim.pull_failures.borrow_mut().push_back(("ErrImagePull", "denied"));
        sim.images.borrow_mut().insert("image:1".to_owned());
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "volumeMounts": [{"name": "data:1", "mountPath": "/v"}]},
            {"name": "b"},
        ]}));
        pod.advance_to(3).await;
        assert_eq!(pod.summary("b"), "running ready");
        assert_eq!(pod.summary("a"), "waiting ImagePullBackOff");
        let waiting = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(waiting.as_deref(), Some("Back-off pulling image \"data:1\": ErrImagePull: denied"));
        pod.advance_to(20).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["pull"]), ["0 pull data:1", "10 pull data:1"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn pull_policy_never_reports_a_missing_image() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a", "imagePullPolicy": "Never"}]}));
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "waiting ErrImageNeverPull");
        assert_eq!(pod.events("a"), [
            "ErrImageNeverPull: Container image \"image:1\" is not present with pull policy of Never",
            "Failed: Error: ErrImageNeverPull",
        ]);
        assert!(sim.log_of(&["pull"]).is_empty());
        pod.stop(1);
        pod.finished().await;
        assert_eq!(pod.summary("a"), "terminated ContainerStatusUnknown 137");
    }
}

lifecycle_test! {
    async fn image_without_tag_is_pulled_each_time() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"containers": [
            {"name": "a", "image": "x"}, {"name": "b", "image": "x"}, {"name": "c", "image": "y:1"}, {"name": "d", "image": "y:1"},
        ]}));
        pod.advance_to(1).await;
        assert_eq!(sim.log_of(&["pull"]), ["0 pull x", "0 pull x", "0 pull y:1"]);
        assert_eq!(
            pod.events("d")[0],
            "Pulled: Container image \"y:1\" already present on machine and can be accessed by the pod"
        );
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn stop_cancels_a_pull() {
        let sim = SimulatedRuntime::new();
        sim.pull_time.set(Duration::from_secs(1000));
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(5).await;
        pod.stop(30);
        pod.finished().await;
        assert_eq!(sim.log(), ["0 set up", "0 pull image:1", "5 tear down"]);
    }
}

lifecycle_test! {
    async fn image_change_ends_the_pull_back_off() {
        let sim = SimulatedRuntime::new();
        sim.pull_failures.borrow_mut().push_back(("ErrImagePull", "denied"));
        let mut pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(4).await;
        pod.update(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.containers[0].image = Some("other:1".to_owned());
        });
        pod.advance_to(5).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["pull"]), ["0 pull image:1", "4 pull other:1"]);
        pod.stop(1);
        pod.finished().await;
    }
}
