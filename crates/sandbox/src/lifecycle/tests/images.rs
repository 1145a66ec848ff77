//! Pulls that fail.

use std::time::Duration;

use serde_json::json;

use crate::lifecycle::simulated_runtime::{SimulatedRuntime, TestPod};

pod_test! {
    async fn a_failing_pull_alternates_and_waits_longer_each_time() {
        let runtime = SimulatedRuntime::new();
        runtime.pulls.borrow_mut().extend(vec![("ErrImagePull", "denied"); 3]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "waiting ErrImagePull");
        pod.at(3).await;
        assert_eq!(pod.summary("a"), "waiting ImagePullBackOff");
        let waiting = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(waiting.as_deref(), Some("Back-off pulling image \"image:1\": ErrImagePull: denied"));
        pod.at(11).await;
        assert_eq!(pod.summary("a"), "waiting ErrImagePull");
        pod.at(100).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["pull"]), [
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
        pod.finish().await;
    }
}

pod_test! {
    async fn an_image_that_is_a_volume_holds_up_those_who_mount_it() {
        let runtime = SimulatedRuntime::new();
        runtime.pulls.borrow_mut().push_back(("ErrImagePull", "denied"));
        runtime.present.borrow_mut().insert("image:1".to_owned());
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "volumeMounts": [{"name": "data:1", "mountPath": "/v"}]},
            {"name": "b"},
        ]}));
        pod.at(3).await;
        assert_eq!(pod.summary("b"), "running ready");
        assert_eq!(pod.summary("a"), "waiting ImagePullBackOff");
        let waiting = pod.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(waiting.as_deref(), Some("Back-off pulling image \"data:1\": ErrImagePull: denied"));
        pod.at(20).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["pull"]), ["0 pull data:1", "10 pull data:1"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn never_pulled_is_told() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a", "imagePullPolicy": "Never"}]}));
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "waiting ErrImageNeverPull");
        assert_eq!(pod.events("a"), [
            "ErrImageNeverPull: Container image \"image:1\" is not present with pull policy of Never",
            "Failed: Error: ErrImageNeverPull",
        ]);
        assert!(runtime.log_of(&["pull"]).is_empty());
        pod.stop(1);
        pod.finish().await;
        assert_eq!(pod.summary("a"), "ended ContainerStatusUnknown 137");
    }
}

pod_test! {
    async fn a_moving_tag_is_pulled_each_time() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"containers": [
            {"name": "a", "image": "x"}, {"name": "b", "image": "x"}, {"name": "c", "image": "y:1"}, {"name": "d", "image": "y:1"},
        ]}));
        pod.at(1).await;
        assert_eq!(runtime.log_of(&["pull"]), ["0 pull x", "0 pull x", "0 pull y:1"]);
        assert_eq!(
            pod.events("d")[0],
            "Pulled: Container image \"y:1\" already present on machine and can be accessed by the pod"
        );
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn stopping_ends_a_pull() {
        let runtime = SimulatedRuntime::new();
        runtime.pull_time.set(Duration::from_secs(1000));
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(5).await;
        pod.stop(30);
        pod.finish().await;
        assert_eq!(runtime.log(), ["0 up", "0 pull image:1", "5 down"]);
    }
}

pod_test! {
    async fn another_image_ends_the_wait() {
        let runtime = SimulatedRuntime::new();
        runtime.pulls.borrow_mut().push_back(("ErrImagePull", "denied"));
        let mut pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(4).await;
        pod.change(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.containers[0].image = Some("other:1".to_owned());
        });
        pod.at(5).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["pull"]), ["0 pull image:1", "4 pull other:1"]);
        pod.stop(1);
        pod.finish().await;
    }
}
