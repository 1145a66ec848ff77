//! Image pulls.

use std::time::Duration;

use serde_json::json;

use crate::life::sim::{Sim, World};

life! {
    async fn failing_pull_backs_off() {
        let sim = Sim::new();
        sim.pulls.borrow_mut().extend(vec![("ErrImagePull", "denied"); 3]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        assert_eq!(world.word("a"), "waiting ErrImagePull");
        world.at(3).await;
        assert_eq!(world.word("a"), "waiting ImagePullBackOff");
        let waiting = world.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(waiting.as_deref(), Some("Back-off pulling image \"image:1\": ErrImagePull: denied"));
        world.at(11).await;
        assert_eq!(world.word("a"), "waiting ErrImagePull");
        world.at(100).await;
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["pull"]), [
            "0 pull image:1", "10 pull image:1", "30 pull image:1", "70 pull image:1",
        ]);
        assert_eq!(world.events("a")[..5], [
            "Pulling: Pulling image \"image:1\"",
            "Failed: Failed to pull image \"image:1\": denied",
            "Failed: Error: ErrImagePull",
            "BackOff: Back-off pulling image \"image:1\"",
            "Failed: Error: ImagePullBackOff",
        ]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failing_image_volume_blocks_only_its_container() {
        let sim = Sim::new();
        sim.pulls.borrow_mut().push_back(("ErrImagePull", "denied"));
        sim.present.borrow_mut().insert("image:1".to_owned());
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "volumeMounts": [{"name": "data:1", "mountPath": "/v"}]},
            {"name": "b"},
        ]}));
        world.at(3).await;
        assert_eq!(world.word("b"), "running ready");
        assert_eq!(world.word("a"), "waiting ImagePullBackOff");
        let waiting = world.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(waiting.as_deref(), Some("Back-off pulling image \"data:1\": ErrImagePull: denied"));
        world.at(20).await;
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["pull"]), ["0 pull data:1", "10 pull data:1"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn pull_policy_never_reports_a_missing_image() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"containers": [{"name": "a", "imagePullPolicy": "Never"}]}));
        world.at(1).await;
        assert_eq!(world.word("a"), "waiting ErrImageNeverPull");
        assert_eq!(world.events("a"), [
            "ErrImageNeverPull: Container image \"image:1\" is not present with pull policy of Never",
            "Failed: Error: ErrImageNeverPull",
        ]);
        assert!(sim.log_of(&["pull"]).is_empty());
        world.stop(1);
        world.finish().await;
        assert_eq!(world.word("a"), "ended ContainerStatusUnknown 137");
    }
}

life! {
    async fn image_without_tag_is_pulled_each_time() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"containers": [
            {"name": "a", "image": "x"}, {"name": "b", "image": "x"}, {"name": "c", "image": "y:1"}, {"name": "d", "image": "y:1"},
        ]}));
        world.at(1).await;
        assert_eq!(sim.log_of(&["pull"]), ["0 pull x", "0 pull x", "0 pull y:1"]);
        assert_eq!(
            world.events("d")[0],
            "Pulled: Container image \"y:1\" already present on machine and can be accessed by the pod"
        );
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn stop_cancels_a_pull() {
        let sim = Sim::new();
        sim.pull_time.set(Duration::from_secs(1000));
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(5).await;
        world.stop(30);
        world.finish().await;
        assert_eq!(sim.log(), ["0 up", "0 pull image:1", "5 down"]);
    }
}

life! {
    async fn image_change_ends_the_pull_back_off() {
        let sim = Sim::new();
        sim.pulls.borrow_mut().push_back(("ErrImagePull", "denied"));
        let mut world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(4).await;
        world.change(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.containers[0].image = Some("other:1".to_owned());
        });
        world.at(5).await;
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["pull"]), ["0 pull image:1", "4 pull other:1"]);
        world.stop(1);
        world.finish().await;
    }
}
