//! Tests of the worker, with a fake sandbox and API server, in simulated time.

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

#[test]
fn sandbox_of_succeeded_pod_is_retired() {
    simulate(async {
        let (fixture, worker) = running_pod("Never").await;
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["podIP"], "100.64.0.5");
        assert_eq!(status["hostIP"], "10.0.0.1");
        assert!(status["startTime"].is_string());

        fixture.sandbox(0).await.report(finished(0));
        fixture.wait_for_phase("Succeeded").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!worker.is_finished());
        let sandbox = fixture.sandbox(0).await;
        assert!(*sandbox.retired.lock().unwrap());
        assert!(!*sandbox.dismissed.lock().unwrap());
        assert_eq!(fixture.launcher.started().len(), 1);

        // The status is still updated.
        fixture.edit_pod(|pod| pod["metadata"]["generation"] = json!(2));
        fixture
            .wait_for(|fixture| {
                let api = fixture.api.lock().unwrap();
                (api.pod["status"]["observedGeneration"] == 2).then_some(())
            })
            .await;
        assert_eq!(
            fixture.api.lock().unwrap().pod["status"]["phase"],
            "Succeeded"
        );
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        worker.await.unwrap();
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn unchanged_status_is_not_written_again() {
    simulate(async {
        let (fixture, _worker) = running_pod("Never").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        let statuses = fixture.api.lock().unwrap().statuses.clone();
        let phases: Vec<_> = statuses.iter().map(|s| s["phase"].clone()).collect();
        assert_eq!(phases.last().unwrap(), "Running");
        assert!(phases.len() <= 3, "{phases:?}");
    });
}

#[test]
fn huge_grace_period_is_limited() {
    simulate(async {
        let (fixture, worker) = running_pod("Always").await;
        fixture.edit_pod(|pod| set_deletion(pod, i64::MAX));
        assert!(wait_for_stop(&fixture, 0).await.grace_seconds >= 86_400);
        fixture.sandbox(0).await.report(finished(143));
        worker.await.unwrap();
    });
}

#[test]
fn deleted_pod_is_stopped_then_object_is_deleted() {
    simulate(async {
        let (fixture, worker) = running_pod("Always").await;
        fixture.edit_pod(|pod| set_deletion(pod, 7));
        let stop = wait_for_stop(&fixture, 0).await;
        assert_eq!((stop.grace_seconds, stop.failure), (7, None));
        assert!(!fixture.api.lock().unwrap().deleted);

        // A shorter grace period is sent to the sandbox.
        fixture.edit_pod(|pod| set_deletion(pod, 2));
        let sandbox = fixture.sandbox(0).await;
        fixture
            .wait_for(|_| (sandbox.stops.lock().unwrap().len() == 2).then_some(()))
            .await;

        sandbox.report(finished(143));
        worker.await.unwrap();
        let api = fixture.api.lock().unwrap();
        assert!(api.deleted);
        assert_eq!(api.statuses.last().unwrap()["phase"], "Failed");
        assert!(*sandbox.dismissed.lock().unwrap());
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn sandbox_of_terminated_step_is_retired() {
    simulate(async {
        let mut pod = pod("Never");
        pod["metadata"]["annotations"] = json!({ "coracle.dev/launcher": "step" });
        let mut fixture = Fixture::with_pod(pod);
        let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
        let sandbox = fixture.sandbox(0).await;
        sandbox.report(finished(3));
        fixture
            .wait_for(|_| sandbox.retired.lock().unwrap().then_some(()))
            .await;
        // Not before the API server has the terminal status.
        assert_eq!(
            fixture.api.lock().unwrap().pod["status"]["phase"],
            json!("Failed")
        );
        tokio::time::sleep(Duration::from_secs(600)).await;
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["phase"], "Failed");
        assert_eq!(
            status["containerStatuses"][0]["state"]["terminated"]["exitCode"],
            3
        );
        assert_eq!(fixture.launcher.started().len(), 1);

        fixture.edit_pod(|pod| set_deletion(pod, 30));
        worker.await.unwrap();
        assert!(fixture.api.lock().unwrap().deleted);
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn force_deleted_pod_is_stopped_and_dismissed() {
    simulate(async {
        let (fixture, worker) = running_pod("Always").await;
        fixture.force_delete();
        assert_eq!(wait_for_stop(&fixture, 0).await.grace_seconds, 30);
        let sandbox = fixture.sandbox(0).await;
        sandbox.report(finished(143));
        worker.await.unwrap();
        assert!(*sandbox.dismissed.lock().unwrap());
        assert_eq!(*fixture.launcher.records.removed.lock().unwrap(), ["u"]);
    });
}

#[test]
fn pod_deleted_before_start_gets_no_sandbox() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        spawn_worker(&mut fixture, WorkerStart::Admitted)
            .await
            .unwrap();
        assert!(fixture.api.lock().unwrap().deleted);
        assert!(fixture.launcher.started().is_empty());
    });
}

#[test]
fn sandbox_without_bundle_ends_with_deleted_pod() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        let sandbox = fixture.sandbox(0).await;
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        worker.await.unwrap();
        let dismissed = *sandbox.dismissed.lock().unwrap();
        assert!(dismissed || *sandbox.killed.lock().unwrap());
        assert!(fixture.api.lock().unwrap().deleted);
    });
}

#[test]
fn adopted_sandbox_without_bundle_is_dismissed() {
    simulate(async {
        let mut fixture = adopted("Always");
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        let worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        let sandbox = fixture.launcher.start();
        worker.await.unwrap();
        assert!(*sandbox.dismissed.lock().unwrap());
        assert!(sandbox.stops.lock().unwrap().is_empty());
    });
}

#[test]
fn lost_sandbox_is_replaced_by_restart_policy() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        fixture.sandbox(0).await.exit();
        wait_for_bundles(&fixture, 1, 1).await;
        let second = fixture.sandbox(1).await;
        let before = second.bundles.lock().unwrap()[0].previous_statuses.clone();
        let end = before[0]
            .state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap();
        assert_eq!(end.exit_code, 137);
        assert_eq!(end.reason.as_deref(), Some("ContainerStatusUnknown"));

        let mut again = running();
        again.containers[0].container_id = Some("coracle://2".to_owned());
        again.containers[0].restart_count = 1;
        again.containers[0].last_state = before[0].state.clone();
        second.report(again);
        fixture
            .wait_for(|fixture| {
                let api = fixture.api.lock().unwrap();
                let status = &api.pod["status"]["containerStatuses"][0];
                (status["restartCount"] == 1 && status["state"]["running"].is_object())
                    .then_some(())
            })
            .await;
        let events = fixture.api.lock().unwrap().events.clone();
        assert_eq!(events[0]["reason"], "SandboxChanged");
    });
}

#[test]
fn lost_sandbox_fails_pod_that_is_never_restarted() {
    simulate(async {
        let (fixture, _worker) = running_pod("Never").await;
        fixture.sandbox(0).await.exit();
        fixture.wait_for_phase("Failed").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 1);
    });
}

#[test]
fn disconnected_sandbox_reconnects() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        let sandbox = fixture.sandbox(0).await;
        sandbox.disconnect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        fixture.launcher.connect(&sandbox);
        // The bundle is sent again.
        wait_for_bundles(&fixture, 0, 2).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 1);
        assert!(!*sandbox.killed.lock().unwrap());
    });
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

#[test]
fn sandbox_of_earlier_kubelet_is_adopted() {
    simulate(async {
        let mut fixture = adopted("Never");
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.resolve();
        tokio::time::sleep(Duration::from_millis(900)).await;
        let sandbox = fixture.launcher.start();
        sandbox.report(running());
        wait_for_bundles(&fixture, 0, 1).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 1);
        let api = fixture.api.lock().unwrap();
        assert!(
            api.statuses
                .iter()
                .all(|status| status["phase"] == "Running")
        );
        assert!(api.statuses.len() <= 2, "{:#?}", api.statuses);
    });
}

#[test]
fn slow_sandbox_of_earlier_kubelet_is_awaited() {
    simulate(async {
        let mut fixture = adopted("Never");
        let sandbox = fixture.launcher.start_unconnected();
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.resolve();
        tokio::time::sleep(Duration::from_secs(40)).await;
        fixture.launcher.connect(&sandbox);
        sandbox.report(running());
        wait_for_bundles(&fixture, 0, 1).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 1);
        assert!(!*sandbox.killed.lock().unwrap());
        assert_eq!(
            fixture.api.lock().unwrap().pod["status"]["phase"],
            "Running"
        );
    });
}

#[test]
fn sandbox_of_pod_without_status_is_adopted() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Never"));
        let sandbox = fixture.launcher.start();
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
        sandbox.report(running());
        fixture.wait_for_phase("Running").await;
        assert_eq!(fixture.launcher.started().len(), 1);
    });
}

#[test]
fn sandbox_that_never_connects_is_killed_and_replaced() {
    simulate(async {
        let mut fixture = adopted("Always");
        let sandbox = fixture.launcher.start_unconnected();
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.resolve();
        wait_for_bundles(&fixture, 1, 1).await;
        assert!(*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn killed_sandbox_is_not_replaced_before_it_ends() {
    simulate(async {
        let mut fixture = adopted("Always");
        let sandbox = fixture.launcher.start_unconnected();
        *sandbox.ignores_kill.lock().unwrap() = true;
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.resolve();
        fixture
            .wait_for(|_| sandbox.killed.lock().unwrap().then_some(()))
            .await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 1);
        sandbox.exit();
        wait_for_bundles(&fixture, 1, 1).await;
    });
}

#[test]
fn adopted_pod_without_sandbox_starts_at_once() {
    simulate(async {
        let mut pod = pod("Never");
        pod["status"]["conditions"] = json!([{ "type": "Initialized", "status": "True" }]);
        let mut fixture = Fixture::with_pod(pod);
        let start = Instant::now();
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
        assert!(start.elapsed() < ADOPTION_TIMEOUT);
        assert!(fixture.api.lock().unwrap().events.is_empty());
    });
}

#[test]
fn records_stay_until_killed_sandbox_has_ended() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        let sandbox = fixture.sandbox(0).await;
        *sandbox.ignores_kill.lock().unwrap() = true;
        sandbox.disconnect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        // As if it were still being started, which takes long.
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(*sandbox.killed.lock().unwrap());
        assert!(fixture.launcher.records.removed.lock().unwrap().is_empty());
        sandbox.exit();
        worker.await.unwrap();
        assert_eq!(*fixture.launcher.records.removed.lock().unwrap(), ["u"]);
    });
}

#[test]
fn rejected_bundle_is_reported_once() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.publish_oversized_bundle();
        let sandbox = fixture.sandbox(0).await;
        let rejections = |fixture: &Fixture| {
            let events = fixture.api.lock().unwrap().events.clone();
            let rejected = events
                .iter()
                .filter(|event| event["reason"] == "FailedSync");
            rejected.count()
        };
        fixture
            .wait_for(|fixture| (rejections(fixture) > 0).then_some(()))
            .await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(rejections(&fixture), 1);
        assert!(sandbox.bundles.lock().unwrap().is_empty());
        // The sandbox goes on, and takes the next bundle.
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
        assert_eq!(fixture.launcher.started().len(), 1);
    });
}

#[test]
fn pod_does_not_end_while_sandbox_may_run() {
    simulate(async {
        let mut fixture = adopted("Always");
        *fixture.launcher.cannot_find.lock().unwrap() = true;
        let sandbox = fixture.launcher.start_unconnected();
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        let worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert!(!fixture.api.lock().unwrap().deleted);
        assert_eq!(fixture.launcher.started().len(), 1);

        *fixture.launcher.cannot_find.lock().unwrap() = false;
        worker.await.unwrap();
        assert!(*sandbox.killed.lock().unwrap());
        assert!(fixture.api.lock().unwrap().deleted);
    });
}

#[test]
fn killed_evicted_pod_keeps_its_reason() {
    simulate(async {
        let (fixture, _worker) = running_pod("Never").await;
        let message = "The node was low on resource: memory.";
        let failure = PodFailure::new(FailureCause::NodePressure, message);
        let evicted = [("u".to_owned(), failure)].into();
        fixture.shared.evictions.send_replace(evicted);
        // The sandbox does not respond to the stop request.
        fixture.wait_for_phase("Failed").await;
        assert!(*fixture.sandbox(0).await.killed.lock().unwrap());
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["reason"], "Evicted", "{status:#}");
    });
}

#[test]
fn queued_sandbox_is_awaited_without_time_out() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut fixture = Fixture::with_pod(pod);
        *fixture.launcher.queued.lock().unwrap() = Some(SandboxState::Starting);
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.resolve();
        let sandbox = fixture.sandbox(0).await;
        // The launcher notices the queue only after a while, which does not count either.
        tokio::time::sleep(Duration::from_secs(5)).await;
        sandbox.launcher_state.send_replace(SandboxState::Queued {
            reason: "Priority".to_owned(),
            expected_start: Some("2026-12-01T00:00:00Z".parse().unwrap()),
        });
        tokio::time::sleep(Duration::from_secs(600)).await;
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["phase"], "Pending");
        assert!(status["startTime"].is_null());
        let events = fixture.api.lock().unwrap().events.clone();
        let events: Vec<_> = events.iter().map(|e| e["message"].clone()).collect();
        assert_eq!(
            events,
            ["waiting for resources: Priority, expected to start at 2026-12-01T00:00:00Z"]
        );

        sandbox.launcher_state.send_replace(SandboxState::Starting);
        sandbox.launcher_state.send_replace(SandboxState::Running);
        fixture.launcher.connect(&sandbox);
        wait_for_bundles(&fixture, 0, 1).await;
        sandbox.report(running());
        fixture.wait_for_phase("Running").await;
        assert_eq!(fixture.launcher.started().len(), 1);
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn queued_sandbox_of_deleted_pod_is_killed() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        *fixture.launcher.queued.lock().unwrap() = Some(SandboxState::Queued {
            reason: "Resources".to_owned(),
            expected_start: None,
        });
        let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        let sandbox = fixture.sandbox(0).await;
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        worker.await.unwrap();
        assert!(*sandbox.killed.lock().unwrap());
        assert!(fixture.api.lock().unwrap().deleted);
    });
}

#[test]
fn connected_one_of_two_sandboxes_is_kept() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        let launched = fixture.sandbox(0).await;
        let other = fixture.launcher.start();
        fixture.resolve();
        wait_for_bundles(&fixture, 1, 1).await;
        assert!(*launched.killed.lock().unwrap());
        other.report(running());
        fixture.wait_for_phase("Running").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 2);
        assert!(!*other.killed.lock().unwrap());

        // Its exit is noticed as well.
        other.exit();
        fixture.sandbox(2).await;
        drop(worker);
    });
}

#[test]
fn only_running_pods_get_incomplete_bundles() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Never"));
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.publish_bundle(false);
        tokio::time::sleep(Duration::from_secs(30)).await;
        let sandbox = fixture.sandbox(0).await;
        assert!(sandbox.bundles.lock().unwrap().is_empty());
        fixture.publish_bundle(true);
        wait_for_bundles(&fixture, 0, 1).await;
        fixture.publish_bundle(false);
        wait_for_bundles(&fixture, 0, 2).await;
    });
    simulate(async {
        let mut fixture = adopted("Never");
        let sandbox = fixture.launcher.start();
        sandbox.report(running());
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.publish_bundle(false);
        wait_for_bundles(&fixture, 0, 1).await;
    });
}

#[test]
fn sandbox_lost_with_kubelet_restarts_the_pod() {
    simulate(async {
        let mut fixture = adopted("Always");
        let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
        let before = fixture.sandbox(0).await.bundles.lock().unwrap()[0]
            .previous_statuses
            .clone();
        assert_eq!(before.len(), 1);
        let statuses = fixture.api.lock().unwrap().statuses.clone();
        assert!(statuses.iter().all(|status| status["phase"] != "Pending"));
    });
}

#[test]
fn unreported_success_is_read_from_checkpoint() {
    simulate(async {
        for start in [WorkerStart::Adopted, WorkerStart::Admitted] {
            let mut fixture = match start {
                WorkerStart::Adopted => adopted("Never"),
                // The earlier kubelet could not write a status.
                _ => Fixture::with_pod(pod("Never")),
            };
            *fixture.launcher.records.checkpoint.lock().unwrap() = Some(finished(0));
            let _worker = spawn_worker(&mut fixture, start);
            fixture.resolve();
            fixture.wait_for_phase("Succeeded").await;
            tokio::time::sleep(Duration::from_secs(600)).await;
            assert_eq!(fixture.launcher.started().len(), 0);
            let api = fixture.api.lock().unwrap();
            assert!(
                api.statuses
                    .iter()
                    .all(|status| status["phase"] != "Failed")
            );
        }
    });
}

#[test]
fn lost_container_keeps_exit_code_of_checkpoint() {
    simulate(async {
        for policy in ["Never", "OnFailure"] {
            let mut fixture = adopted(policy);
            let mut checkpoint = finished(5);
            checkpoint.finished = false;
            *fixture.launcher.records.checkpoint.lock().unwrap() = Some(checkpoint);
            let _worker = spawn_worker(&mut fixture, WorkerStart::Adopted);
            fixture.resolve();
            if policy == "Never" {
                fixture.wait_for_phase("Failed").await;
                let api = fixture.api.lock().unwrap();
                let state = &api.pod["status"]["containerStatuses"][0]["state"];
                assert_eq!(state["terminated"]["exitCode"], 5, "{state}");
                continue;
            }
            wait_for_bundles(&fixture, 0, 1).await;
            let bundle = fixture.sandbox(0).await.bundles.lock().unwrap()[0].clone();
            let state = bundle.previous_statuses[0].state.clone().unwrap();
            assert_eq!(state.terminated.unwrap().exit_code, 5);
        }
    });
}

#[test]
fn only_newest_status_is_written_after_outage() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        let count = fixture.api.lock().unwrap().statuses.len();
        fixture.api.lock().unwrap().unavailable = true;
        for restarts in 1..20 {
            let mut state = running();
            state.containers[0].restart_count = restarts;
            fixture.sandbox(0).await.report(state);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        fixture.api.lock().unwrap().unavailable = false;
        fixture
            .wait_for(|fixture| {
                let api = fixture.api.lock().unwrap();
                (api.pod["status"]["containerStatuses"][0]["restartCount"] == 19).then_some(())
            })
            .await;
        assert_eq!(fixture.api.lock().unwrap().statuses.len(), count + 1);
    });
}

#[test]
fn overwritten_condition_is_restored() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        // As the node controller does when a node was unreachable.
        fixture.edit_pod(|pod| {
            for condition in pod["status"]["conditions"].as_array_mut().unwrap() {
                if condition["type"] == "Ready" {
                    condition["status"] = json!("False");
                }
            }
        });
        fixture
            .wait_for(|fixture| {
                let api = fixture.api.lock().unwrap();
                let conditions = api.pod["status"]["conditions"].as_array().unwrap().clone();
                conditions
                    .iter()
                    .any(|c| c["type"] == "Ready" && c["status"] == "True")
                    .then_some(())
            })
            .await;
    });
}

#[test]
fn deadline_is_enforced_before_sandbox_has_bundle() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut fixture = Fixture::with_pod(pod);
        let start = Instant::now();
        let worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        // No bundle is published, as with a missing config map.
        let sandbox = fixture.sandbox(0).await;
        fixture.wait_for_phase("Failed").await;
        assert!((29..=32).contains(&start.elapsed().as_secs()));
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["reason"], "DeadlineExceeded");
        assert_eq!(
            status["message"],
            "Pod was active on the node longer than the specified deadline"
        );
        assert!(
            status["conditions"]
                .as_array()
                .unwrap()
                .iter()
                .all(|c| c["type"] != "DisruptionTarget")
        );
        assert!(*sandbox.dismissed.lock().unwrap());
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!worker.is_finished());
        assert_eq!(fixture.launcher.started().len(), 1);
        let events = fixture.api.lock().unwrap().events.clone();
        let reasons: Vec<_> = events.iter().map(|event| event["reason"].clone()).collect();
        assert_eq!(reasons, ["DeadlineExceeded"]);
    });
}

#[test]
fn deadline_is_enforced_without_sandbox() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut fixture = Fixture::with_pod(pod);
        *fixture.launcher.fails.lock().unwrap() = true;
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.resolve();
        fixture.wait_for_phase("Failed").await;
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["reason"], "DeadlineExceeded");
    });
}

#[test]
fn deadline_is_left_to_sandbox_with_bundle() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut fixture = Fixture::with_pod(pod);
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
        fixture.sandbox(0).await.report(running());
        fixture.wait_for_phase("Running").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(
            fixture.api.lock().unwrap().pod["status"]["phase"],
            "Running"
        );
        assert!(fixture.sandbox(0).await.stops.lock().unwrap().is_empty());
    });
}

#[test]
fn evicted_pod_fails_and_is_not_restarted() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        let message = "The node was low on resource: memory. ";
        let failure = PodFailure::new(FailureCause::NodePressure, message);
        let evicted = [("u".to_owned(), failure.clone())].into();
        fixture.shared.evictions.send_replace(evicted);
        let stop = wait_for_stop(&fixture, 0).await;
        assert_eq!(
            (stop.grace_seconds, stop.failure.as_ref()),
            (1, Some(&failure))
        );
        fixture.sandbox(0).await.report(PodState {
            failure: stop.failure,
            ..finished(137)
        });
        fixture.wait_for_phase("Failed").await;
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["reason"], "Evicted");
        let conditions = status["conditions"].as_array().unwrap();
        assert!(conditions.iter().any(|c| c["type"] == "DisruptionTarget"));
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(fixture.launcher.started().len(), 1);
        let events = fixture.api.lock().unwrap().events.clone();
        assert_eq!(
            events
                .iter()
                .filter(|event| event["reason"] == "Evicted")
                .count(),
            1
        );
    });
}

#[test]
fn unknown_runtime_class_prevents_launch() {
    simulate(async {
        for (class, message) in [
            (
                "foreign",
                "Failed to create pod sandbox: failed to get sandbox runtime: no runtime for \"kata\" is configured",
            ),
            (
                "none",
                "Failed to create pod sandbox: runtimeclass.node.k8s.io \"none\" not found",
            ),
        ] {
            let mut pod = pod("Always");
            pod["spec"]["runtimeClassName"] = json!(class);
            let mut fixture = Fixture::with_pod(pod);
            let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
            fixture.resolve();
            let event = fixture
                .wait_for(|fixture| fixture.api.lock().unwrap().events.first().cloned())
                .await;
            assert_eq!(event["reason"], "FailedCreatePodSandBox");
            assert_eq!(event["message"], message);
            assert!(fixture.launcher.started().is_empty());
        }
        let mut pod = pod("Always");
        pod["spec"]["runtimeClassName"] = json!("own");
        let mut fixture = Fixture::with_pod(pod);
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture.resolve();
        wait_for_bundles(&fixture, 0, 1).await;
    });
}

#[test]
fn node_shutdown_terminates_pods() {
    simulate(async {
        let (fixture, worker) = running_pod("Always").await;
        let until = Instant::now() + Duration::from_secs(10);
        fixture.shutdown.send_replace(Some(until));
        let stop = wait_for_stop(&fixture, 0).await;
        let cause = stop.failure.as_ref().unwrap().cause;
        assert_eq!(cause, FailureCause::NodeShutdown);
        assert!((8..=10).contains(&stop.grace_seconds));
        let sandbox = fixture.sandbox(0).await;
        sandbox.report(PodState {
            failure: stop.failure,
            ..finished(143)
        });
        worker.await.unwrap();
        let api = fixture.api.lock().unwrap();
        let status = &api.pod["status"];
        assert_eq!(status["phase"], "Failed");
        assert_eq!(status["reason"], "Terminated");
        assert!(!api.deleted);
        assert!(*sandbox.dismissed.lock().unwrap());
    });
}

#[test]
fn rejected_pod_fails_and_gets_no_sandbox() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        let problem = Problem {
            reason: "OutOfcpu".to_owned(),
            message: "none left".to_owned(),
        };
        let worker = spawn_worker(&mut fixture, WorkerStart::Rejected(problem));
        fixture.wait_for_phase("Failed").await;
        fixture
            .wait_for(|fixture| {
                let api = fixture.api.lock().unwrap();
                (!api.events.is_empty()).then_some(())
            })
            .await;
        assert_eq!(
            fixture.api.lock().unwrap().pod["status"]["reason"],
            "OutOfcpu"
        );
        assert!(fixture.launcher.started().is_empty());
        fixture.edit_pod(|pod| set_deletion(pod, 30));
        worker.await.unwrap();
        assert!(fixture.api.lock().unwrap().deleted);
    });
}

#[test]
fn recently_set_node_label_is_considered() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["nodeSelector"] = json!({ "new": "yes" });
        let mut fixture = Fixture::with_pod(pod);
        fixture.api.lock().unwrap().node["metadata"]["labels"] = json!({ "new": "yes" });
        let problem = Problem {
            reason: "NodeAffinity".to_owned(),
            message: String::new(),
        };
        let _worker = spawn_worker(&mut fixture, WorkerStart::RecheckNodeAffinity(problem));
        fixture.sandbox(0).await;
    });
}

#[test]
fn failed_launch_is_retried() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod("Always"));
        *fixture.launcher.fails.lock().unwrap() = true;
        let _worker = spawn_worker(&mut fixture, WorkerStart::Admitted);
        fixture
            .wait_for(|fixture| {
                let api = fixture.api.lock().unwrap();
                (!api.events.is_empty()).then_some(())
            })
            .await;
        let event = fixture.api.lock().unwrap().events[0].clone();
        assert_eq!(event["reason"], "FailedCreatePodSandBox");
        assert_eq!(
            event["message"],
            "Failed to create pod sandbox: no more processes"
        );
        *fixture.launcher.fails.lock().unwrap() = false;
        fixture.sandbox(0).await;
    });
}

#[test]
fn each_event_is_recorded_once() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        let event = |serial| PodEvent {
            serial,
            at: Timestamp::now(),
            warning: false,
            reason: "Started".to_owned(),
            message: format!("Started container {serial}"),
            field_path: Some("spec.containers{a}".to_owned()),
        };
        let sandbox = fixture.sandbox(0).await;
        let mut state = running();
        for serial in 1..=3 {
            state.events.push(event(serial));
            sandbox.report(state.clone());
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let events = fixture.api.lock().unwrap().events.clone();
        let messages: Vec<_> = events.iter().map(|e| e["message"].clone()).collect();
        assert_eq!(
            messages,
            [
                "Started container 1",
                "Started container 2",
                "Started container 3"
            ]
        );
        assert_eq!(
            events[0]["involvedObject"]["fieldPath"],
            "spec.containers{a}"
        );
    });
}

#[test]
fn terminal_phase_set_by_others_ends_pod() {
    simulate(async {
        let (fixture, _worker) = running_pod("Always").await;
        fixture.edit_pod(|pod| {
            pod["status"]["phase"] = json!("Failed");
            pod["status"]["reason"] = json!("NodeLost");
        });
        wait_for_stop(&fixture, 0).await;
        fixture.sandbox(0).await.report(finished(0));
        tokio::time::sleep(Duration::from_secs(60)).await;
        let status = fixture.api.lock().unwrap().pod["status"].clone();
        assert_eq!(
            (&status["phase"], &status["reason"]),
            (&json!("Failed"), &json!("NodeLost"))
        );
    });
}

#[test]
fn sandbox_that_does_not_stop_is_killed() {
    simulate(async {
        let (fixture, worker) = running_pod("Always").await;
        fixture.edit_pod(|pod| set_deletion(pod, 5));
        worker.await.unwrap();
        assert!(*fixture.sandbox(0).await.killed.lock().unwrap());
        assert!(fixture.api.lock().unwrap().deleted);
    });
}
