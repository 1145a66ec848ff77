//! A pod whose sandbox was lost.

use k8s_openapi::api::core::v1::ContainerStatus;
use serde_json::{Value, json};

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod, bundle};
use Script::Exits;

fn after(runtime: &std::rc::Rc<SimulatedRuntime>, spec: Value, before: Value) -> TestPod {
    let mut bundle = bundle(spec);
    bundle.previous_statuses =
        serde_json::from_value::<Vec<ContainerStatus>>(before).expect("statuses");
    TestPod::with(runtime, bundle)
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

pod_test! {
    async fn all_is_run_again_and_counts_go_on() {
        let runtime = SimulatedRuntime::new().script("i", &[Exits(5, 0)]);
        let pod = after(&runtime,
            json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("i", 0, ended(0)), status("a", 2, running()), status("b", 1, ended(1))]),
        );
        pod.at(1).await;
        assert_eq!(pod.summary("i"), "running (last Completed 0) r1");
        assert_eq!(pod.summary("a"), "waiting PodInitializing (last ContainerStatusUnknown 137) r2");
        assert_eq!(pod.summary("b"), "ended Error 1 r1");
        pod.at(6).await;
        assert_eq!(pod.summary("a"), "running (last ContainerStatusUnknown 137) r3 ready");
        assert_eq!(pod.summary("b"), "running (last Error 1) r2 ready");
        assert_eq!(runtime.log_of(&["start"]), ["0 start i#1", "5 start a#3", "5 start b#2"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_pod_that_is_never_restarted_is_over() {
        let runtime = SimulatedRuntime::new();
        let pod = after(&runtime,
            json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("a", 0, running()), status("b", 0, ended(0))]),
        );
        pod.finish().await;
        assert_eq!(pod.summary("a"), "ended ContainerStatusUnknown 137");
        assert_eq!(pod.summary("b"), "ended Completed 0");
        assert!(runtime.log_of(&["start"]).is_empty());
    }
}

pod_test! {
    async fn a_pod_that_never_ran_just_starts() {
        let runtime = SimulatedRuntime::new();
        let pod = after(&runtime,
            json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}),
            json!([{"name": "a", "restartCount": 0, "image": "i", "imageID": "", "ready": false,
                "state": {"waiting": {"reason": "ContainerCreating"}}}]),
        );
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "running ready");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn what_succeeded_is_not_repeated_on_failure() {
        let runtime = SimulatedRuntime::new();
        let pod = after(&runtime,
            json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}, {"name": "b"}]}),
            json!([status("a", 0, running()), status("b", 0, ended(0))]),
        );
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "running (last ContainerStatusUnknown 137) r1 ready");
        assert_eq!(pod.summary("b"), "ended Completed 0");
        pod.stop(1);
        pod.finish().await;

        let runtime = SimulatedRuntime::new();
        let pod = after(&runtime,
            json!({"restartPolicy": "OnFailure", "initContainers": [{"name": "i"}], "containers": [{"name": "b"}]}),
            json!([status("i", 0, ended(0)), status("b", 0, ended(0))]),
        );
        pod.finish().await;
        assert!(runtime.log_of(&["start"]).is_empty());
    }
}
