//! Later bundles, and restarts of all containers.

use serde_json::{from_value, json};

use crate::life::sim::{Script, Sim, World, bundle, with_problem};
use Script::{Ends, Obeys};
use pod_protocol::{Problem, Stop};

life! {
    async fn image_change_restarts_despite_restart_policy() {
        let sim = Sim::new();
        let mut world = World::new(&sim, json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        world.at(1).await;
        world.change(|bundle| {
            bundle.pod.metadata.generation = Some(2);
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.containers[0].image = Some("other:1".to_owned());
        });
        let state = world.at(2).await;
        assert_eq!(state.observed_generation, Some(2));
        assert_eq!(world.word("a"), "running (last Error 143) r1 ready");
        assert_eq!(world.status("a").image, "docker.io/library/other:1");
        assert!(world.events("a").contains(
            &"Killing: Container a definition changed, will be restarted".to_owned()
        ));
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn status_shows_old_resources_until_resize_restart() {
        let sim = Sim::new().script("a", &[Obeys(5, 0)]).script("b", &[Obeys(5, 0)]);
        let resources = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let container = |name: &str, policy: &str| json!({"name": name, "resources": resources("1"),
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}]});
        let containers = [container("a", "RestartContainer"), container("b", "NotRequired")];
        let mut world = World::new(&sim, json!({"containers": containers}));
        world.at(1).await;
        world.change(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            for container in &mut spec.containers {
                container.resources = from_value(resources("2")).expect("resources");
            }
        });
        let cpus = |world: &World, name: &str| {
            let status = world.status(name);
            let has = status.resources.and_then(|has| has.requests).expect("requests");
            let given = status.allocated_resources.expect("requests");
            format!("{} of {}", has["cpu"].0, given["cpu"].0)
        };
        world.at(3).await;
        assert_eq!(cpus(&world, "a"), "1 of 2");
        assert_eq!(cpus(&world, "b"), "2 of 2");
        world.at(10).await;
        assert_eq!(cpus(&world, "a"), "2 of 2");
        assert_eq!(world.word("a"), "running (last Completed 0) r1 ready");
        assert_eq!(world.word("b"), "running ready");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn changed_inputs_restart_nothing() {
        let sim = Sim::new();
        let mut world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        world.change(|bundle| {
            bundle.containers.insert("a".to_owned(), with_problem("CreateContainerConfigError", "gone"));
        });
        world.at(5).await;
        assert_eq!(sim.log_of(&["start", "signal"]), ["0 start a#0"]);
        assert_eq!(world.word("a"), "running ready");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn container_waits_for_missing_config() {
        let sim = Sim::new();
        let mut bundle = bundle(json!({"containers": [{"name": "a"}, {"name": "b"}]}));
        bundle.containers.insert(
            "a".to_owned(),
            with_problem("CreateContainerConfigError", "configmap \"c\" not found"),
        );
        let mut world = World::with(&sim, bundle);
        world.at(1).await;
        assert_eq!(world.word("a"), "waiting CreateContainerConfigError");
        assert_eq!(world.word("b"), "running ready");
        assert!(world.events("a").contains(&"Failed: Error: configmap \"c\" not found".to_owned()));
        world.change(|bundle| {
            bundle.containers.insert("a".to_owned(), with_problem("CreateContainerConfigError", "another"));
        });
        world.at(100).await;
        let message = world.status("a").state.and_then(|s| s.waiting).and_then(|w| w.message);
        assert_eq!(message.as_deref(), Some("another"));
        world.change(|bundle| bundle.containers.clear());
        world.at(101).await;
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start b#0", "100 start a#0"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn ephemeral_containers_run_only_once() {
        let sim = Sim::new().script("e", &[Ends(3, 1)]);
        let mut world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        world.change(|bundle| {
            let spec = bundle.pod.spec.as_mut().expect("a spec");
            spec.ephemeral_containers = Some(vec![
                from_value(json!({"name": "e", "image": "image:1", "targetContainerName": "a"})).expect("a container"),
            ]);
        });
        world.at(2).await;
        assert_eq!(world.word("e"), "running");
        world.at(60).await;
        assert_eq!(world.word("e"), "ended Error 1");
        assert_eq!(sim.log_of(&["start"]), ["0 start a#0", "1 start e#0"]);
        assert!(world.state().events.iter().any(
            |event| event.field_path.as_deref() == Some("spec.ephemeralContainers{e}")
        ));
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn exit_code_rule_restarts_all_containers() {
        let sim = Sim::new()
            .script("i", &[Ends(1, 0)])
            .script("a", &[Ends(4, 88), Obeys(0, 0)]);
        let world = World::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [
                {"name": "a", "restartPolicy": "Never", "restartPolicyRules": [
                    {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [88]}}]},
                {"name": "b"},
            ],
        }));
        world.at(10).await;
        assert_eq!(sim.log_of(&["start"]), [
            "0 start i#0", "1 start a#0", "1 start b#0", "5 start i#1", "6 start a#1", "6 start b#1",
        ]);
        assert_eq!(world.word("b"), "running (last Error 143) r1 ready");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failure_of_a_stop_is_kept() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        let failure = Some(Problem { reason: "Evicted".to_owned(), message: "no room".to_owned() });
        world.life.stop(Stop { grace_seconds: 1, failure: failure.clone() });
        let state = world.finish().await;
        assert_eq!(state.failure, failure);
    }
}

life! {
    async fn stop_before_pod_setup_starts_nothing() {
        let sim = Sim::new();
        sim.ups.borrow_mut().extend(vec![("", "no network"); 10]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        world.stop(30);
        world.finish().await;
        assert!(sim.log_of(&["start"]).is_empty());
    }
}

life! {
    async fn only_spec_or_volume_changes_retry_setup_early() {
        let sim = Sim::new();
        sim.ups.borrow_mut().extend(vec![("FailedMount", "no volume"); 5]);
        let mut world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(8).await;
        world.change(|bundle| bundle.pod.metadata.resource_version = Some("2".to_owned()));
        world.at(9).await;
        world.change(|bundle| {
            bundle.volumes.insert("v".to_owned(), json!({}));
        });
        world.at(10).await;
        assert_eq!(sim.log_of(&["up"]), ["0 up", "1 up", "3 up", "7 up", "9 up"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn state_is_published_only_on_change() {
        let sim = Sim::new();
        let mut world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        let mut state = world.life.state();
        state.mark_unchanged();
        world.change(|_| {});
        world.at(50).await;
        assert!(!state.has_changed().expect("the life goes on"));
        world.stop(1);
        world.finish().await;
    }
}
