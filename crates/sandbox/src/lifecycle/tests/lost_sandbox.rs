//! Pods whose earlier sandbox was lost.

use k8s_openapi::api::core::v1::ContainerStatus;
use serde_json::{Value, json};

use crate::lifecycle::simulated_runtime::{ScriptedRun, SimulatedRuntime, TestPod, bundle};
use ScriptedRun::Exits;

/// A pod whose earlier sandbox reported these statuses.
fn replacement(sim: &std::rc::Rc<SimulatedRuntime>, spec: Value, statuses: Value) -> TestPod {
    let mut bundle = bundle(spec);
    bundle.previous_statuses =
        serde_json::from_value::<Vec<ContainerStatus>>(statuses).expect("statuses");
    TestPod::with_bundle(sim, bundle)
}

fn status(name: &str, restarts: i32, state: Value) -> Value {
    json!({"name": name, "restartCount": restarts, "image": "i", "imageID": "", "ready": false,
        "containerID": "coracle://abc", "state": state})
}

fn running() -> Value {
    json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})
}

fn terminated(exit_code: i32) -> Value {
    let reason = if exit_code == 0 { "Completed" } else { "Error" };
    json!({"terminated": {"exitCode": exit_code, "reason": reason}})
}

lifecycle_test! {
    async fn containers_run_again_and_restart_counts_continue() {
        let sim = SimulatedRuntime::new().script("i", &[Exits(5, 0)]);
        let pod = replacement(&sim,
            json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("i", 0, terminated(0)), status("a", 2, running()), status("b", 1, terminated(1))]),
        );
        pod.advance_to(1).await;
        assert_eq!(pod.summary("i"), "running (last Completed 0) r1");
        assert_eq!(pod.summary("a"), "waiting PodInitializing (last ContainerStatusUnknown 137) r2");
        assert_eq!(pod.summary("b"), "terminated Error 1 r1");
        pod.advance_to(6).await;
        assert_eq!(pod.summary("a"), "running (last ContainerStatusUnknown 137) r3 ready");
        assert_eq!(pod.summary("b"), "running (last Error 1) r2 ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#1", "5 start a#3", "5 start b#2"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn never_restarted_pod_finishes() {
        let sim = SimulatedRuntime::new();
        let pod = replacement(&sim,
            json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("a", 0, running()), status("b", 0, terminated(0))]),
        );
        pod.finished().await;
        assert_eq!(pod.summary("a"), "terminated ContainerStatusUnknown 137");
        assert_eq!(pod.summary("b"), "terminated Completed 0");
        assert!(sim.log_of(&["start"]).is_empty());
    }
}

lifecycle_test! {
    async fn pod_that_never_ran_starts() {
        let sim = SimulatedRuntime::new();
        let pod = replacement(&sim,
            json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}),
            json!([{"name": "a", "restartCount": 0, "image": "i", "imageID": "", "ready": false,
                "state": {"waiting": {"reason": "ContainerCreating"}}}]),
        );
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "running ready");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn on_failure_does_not_repeat_succeeded_containers() {
        let sim = SimulatedRuntime::new();
        let pod = replacement(&sim,
            json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("a", 0, running()), status("b", 0, terminated(0))]),
        );
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "running (last ContainerStatusUnknown 137) r1 ready");
        assert_eq!(pod.summary("b"), "terminated Completed 0");
        pod.stop(1);
        pod.finished().await;

        let sim = SimulatedRuntime::new();
        let pod = replacement(&sim,
            json!({"restartPolicy": "OnFailure", "initContainers": [{"name": "i"}], "containers": [{"name": "b"}]}),
            json!([status("i", 0, terminated(0)), status("b", 0, terminated(0))]),
        );
        pod.finished().await;
        assert!(sim.log_of(&["start"]).is_empty());
    }
}
