//! Pods whose earlier sandbox was lost.

use k8s_openapi::api::core::v1::ContainerStatus;
use serde_json::{Value, json};

use crate::life::sim::{Script, Sim, World, bundle};
use Script::Ends;

fn after(sim: &std::rc::Rc<Sim>, spec: Value, before: Value) -> World {
    let mut bundle = bundle(spec);
    bundle.previous_statuses =
        serde_json::from_value::<Vec<ContainerStatus>>(before).expect("statuses");
    World::with(sim, bundle)
}

fn status(name: &str, restarts: i32, state: Value) -> Value {
    json!({"name": name, "restartCount": restarts, "image": "i", "imageID": "", "ready": false,
        "containerID": "coracle://abc", "state": state})
}

fn running() -> Value {
    json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})
}

fn ended(code: i32) -> Value {
    let reason = if code == 0 { "Completed" } else { "Error" };
    json!({"terminated": {"exitCode": code, "reason": reason}})
}

life! {
    async fn containers_run_again_and_restart_counts_continue() {
        let sim = Sim::new().script("i", &[Ends(5, 0)]);
        let world = after(&sim,
            json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("i", 0, ended(0)), status("a", 2, running()), status("b", 1, ended(1))]),
        );
        world.at(1).await;
        assert_eq!(world.word("i"), "running (last Completed 0) r1");
        assert_eq!(world.word("a"), "waiting PodInitializing (last ContainerStatusUnknown 137) r2");
        assert_eq!(world.word("b"), "ended Error 1 r1");
        world.at(6).await;
        assert_eq!(world.word("a"), "running (last ContainerStatusUnknown 137) r3 ready");
        assert_eq!(world.word("b"), "running (last Error 1) r2 ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#1", "5 start a#3", "5 start b#2"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn never_restarted_pod_finishes() {
        let sim = Sim::new();
        let world = after(&sim,
            json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("a", 0, running()), status("b", 0, ended(0))]),
        );
        world.finish().await;
        assert_eq!(world.word("a"), "ended ContainerStatusUnknown 137");
        assert_eq!(world.word("b"), "ended Completed 0");
        assert!(sim.log_of(&["start"]).is_empty());
    }
}

life! {
    async fn pod_that_never_ran_starts() {
        let sim = Sim::new();
        let world = after(&sim,
            json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}),
            json!([{"name": "a", "restartCount": 0, "image": "i", "imageID": "", "ready": false,
                "state": {"waiting": {"reason": "ContainerCreating"}}}]),
        );
        world.at(1).await;
        assert_eq!(world.word("a"), "running ready");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn on_failure_does_not_repeat_succeeded_containers() {
        let sim = Sim::new();
        let world = after(&sim,
            json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("a", 0, running()), status("b", 0, ended(0))]),
        );
        world.at(1).await;
        assert_eq!(world.word("a"), "running (last ContainerStatusUnknown 137) r1 ready");
        assert_eq!(world.word("b"), "ended Completed 0");
        world.stop(1);
        world.finish().await;

        let sim = Sim::new();
        let world = after(&sim,
            json!({"restartPolicy": "OnFailure", "initContainers": [{"name": "i"}], "containers": [{"name": "b"}]}),
            json!([status("i", 0, ended(0)), status("b", 0, ended(0))]),
        );
        world.finish().await;
        assert!(sim.log_of(&["start"]).is_empty());
    }
}
