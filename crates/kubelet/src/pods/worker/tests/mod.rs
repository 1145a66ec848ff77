//! Tests of the worker, with a fake sandbox and API server, in simulated time.

mod adoption;
mod deletion;
mod failure;
mod lost_sandbox;
mod start;
mod status;

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::{FailureCause, PodEvent};
use serde_json::{Value, json};
use tokio::task::{JoinHandle, LocalSet};

use super::*;
use crate::pods::fake::Fixture;

fn pod(policy: &str) -> Value {
    json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "u", "generation": 1, "resourceVersion": "100" },
        "spec": {
            "restartPolicy": policy, "terminationGracePeriodSeconds": 30,
            "containers": [{ "name": "a", "image": "i" }],
        },
        "status": { "phase": "Pending" },
    })
}

fn spawn_worker(fixture: &mut Fixture, start: WorkerStart) -> JoinHandle<()> {
    let inputs = WorkerInputs {
        pods: fixture.updates.clone(),
        bundles: fixture.bundles.subscribe(),
        sandboxes: fixture.connections.take().unwrap(),
        shutdown: fixture.shutdown.subscribe(),
    };
    let shared = Arc::clone(&fixture.shared);
    tokio::task::spawn_local(Worker::run(shared, inputs, start))
}

/// Runs a test in simulated time.
fn simulate(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(LocalSet::new().run_until(test));
}

fn state(container: Value) -> PodState {
    let mut status =
        json!({ "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0 });
    let fields = status.as_object_mut().unwrap();
    fields.extend(container.as_object().unwrap().clone());
    let status: ContainerStatus = serde_json::from_value(status).unwrap();
    PodState {
        host: crate::pods::fake::host(),
        sandbox_ready: true,
        pod_ips: vec!["100.64.0.5".to_owned()],
        containers: vec![status],
        ..Default::default()
    }
}

fn running() -> PodState {
    state(json!({
        "ready": true, "started": true, "containerID": "coracle://1",
        "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } },
    }))
}

fn finished(code: i32) -> PodState {
    PodState {
        finished: true,
        ..state(json!({
            "containerID": "coracle://1", "state": { "terminated": { "exitCode": code } },
        }))
    }
}

/// Waits until a sandbox has received this number of bundles.
async fn wait_for_bundles(fixture: &Fixture, sandbox: usize, count: usize) {
    let sandbox = fixture.sandbox(sandbox).await;
    fixture
        .wait_for(|_| (sandbox.bundles.lock().unwrap().len() >= count).then_some(()))
        .await;
}

/// Waits for a stop request to a sandbox.
async fn wait_for_stop(fixture: &Fixture, sandbox: usize) -> Stop {
    let sandbox = fixture.sandbox(sandbox).await;
    fixture
        .wait_for(|_| sandbox.stops.lock().unwrap().last().cloned())
        .await
}

/// A running pod.
async fn running_pod(policy: &str) -> (Fixture, JoinHandle<()>) {
    let mut fixture = Fixture::with_pod(pod(policy));
    let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
    fixture.resolve();
    wait_for_bundles(&fixture, 0, 1).await;
    fixture.sandbox(0).await.report(running());
    fixture.wait_for_phase("Running").await;
    (fixture, worker)
}

fn set_deletion(pod: &mut Value, grace: i64) {
    pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:01:00Z");
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
}

/// A pod that an earlier kubelet has started.
fn adopted(policy: &str) -> Fixture {
    let mut pod = pod(policy);
    let running = &running().containers[0];
    pod["status"] = json!({
        "phase": "Running", "startTime": "2026-01-01T00:00:00Z", "containerStatuses": [running],
    });
    Fixture::with_pod(pod)
}
