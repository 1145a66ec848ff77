//! Tests of the sync loop, with a fake API server and fake sandboxes, in simulated time.

use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, LocalSet};

use super::*;
use crate::pods::fake::{FakeSandbox, Fixture};

fn pod() -> Value {
    json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "u", "generation": 1, "resourceVersion": "100" },
        "spec": { "terminationGracePeriodSeconds": 30, "containers": [{ "name": "a", "image": "i" }] },
        "status": { "phase": "Pending" },
    })
}

fn simulate(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(LocalSet::new().run_until(test));
}

/// Runs the sync loop. All connecting sandboxes belong to the pod with this `uid`.
fn start(fixture: &mut Fixture, uid: &'static str) -> (oneshot::Sender<Instant>, JoinHandle<()>) {
    let (connected, sandboxes) = mpsc::unbounded_channel();
    let mut connections = fixture.connections.take().unwrap();
    tokio::task::spawn_local(async move {
        while let Some(mut sandbox) = connections.recv().await {
            sandbox.hello.uid = uid.to_owned();
            let _ = connected.send(sandbox);
        }
    });
    let (shutdown, receiver) = oneshot::channel();
    let deadline = async { receiver.await.unwrap() };
    let sync_loop = run(Arc::clone(&fixture.shared), sandboxes, deadline);
    (shutdown, tokio::task::spawn_local(sync_loop))
}

/// The first sandbox, once it has its bundle.
async fn started_sandbox(fixture: &Fixture) -> Arc<FakeSandbox> {
    let sandbox = fixture.sandbox(0).await;
    fixture
        .wait_for(|_| sandbox.bundles.lock().unwrap().first().cloned())
        .await;
    sandbox
}

#[test]
fn listed_pod_gets_sandbox_and_bundle() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        let _sync_loop = start(&mut fixture, "u");
        started_sandbox(&fixture).await;
    });
}

#[test]
fn sandbox_that_connects_before_its_pod_is_adopted() {
    simulate(async {
        let mut adopted = pod();
        adopted["status"] = json!({ "phase": "Running", "startTime": "2026-01-01T00:00:00Z" });
        let mut fixture = Fixture::with_pod(adopted);
        fixture.api.lock().unwrap().unavailable = true;
        let _sync_loop = start(&mut fixture, "u");
        let sandbox = fixture.launcher.start();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(sandbox.stops.lock().unwrap().is_empty());
        fixture.api.lock().unwrap().unavailable = false;
        fixture
            .wait_for(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
        assert_eq!(fixture.launcher.started().len(), 1);
    });
}

#[test]
fn orphaned_sandbox_is_ended() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        fixture.api.lock().unwrap().deleted = true;
        let _sync_loop = start(&mut fixture, "another");
        tokio::time::sleep(Duration::from_secs(1)).await;
        let orphan = fixture.launcher.start();
        // It has no bundle, so it is dismissed at once.
        fixture
            .wait_for(|_| orphan.dismissed.lock().unwrap().then_some(()))
            .await;
        assert_eq!(orphan.stops.lock().unwrap().len(), 1);
    });
}

#[test]
fn shutdown_waits_for_pods_until_deadline() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        let (shutdown, sync_loop) = start(&mut fixture, "u");
        let sandbox = started_sandbox(&fixture).await;
        let start = Instant::now();
        shutdown.send(start + Duration::from_secs(10)).unwrap();
        let stop = fixture
            .wait_for(|_| sandbox.stops.lock().unwrap().first().cloned())
            .await;
        // Less than the pod's grace period; the rest is for writing its last status.
        assert_eq!(stop.grace_seconds, 8);
        sync_loop.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), 10);
    });
}

#[test]
fn shutdown_ends_when_pods_have_ended() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        let (shutdown, sync_loop) = start(&mut fixture, "u");
        let sandbox = started_sandbox(&fixture).await;
        let start = Instant::now();
        shutdown.send(start + Duration::from_secs(10)).unwrap();
        let stop = fixture
            .wait_for(|_| sandbox.stops.lock().unwrap().first().cloned())
            .await;
        sandbox.report(pod_protocol::PodState {
            finished: true,
            failure: stop.failure,
            ..Default::default()
        });
        sync_loop.await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(2));
        assert!(*sandbox.dismissed.lock().unwrap());
        assert_eq!(
            fixture.api.lock().unwrap().pod["status"]["reason"],
            "Terminated"
        );
    });
}

#[test]
fn records_of_deleted_pods_are_removed() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        let records = Arc::clone(&fixture.launcher.records);
        *records.uids.lock().unwrap() = vec!["u".to_owned(), "orphaned".to_owned()];
        let _sync_loop = start(&mut fixture, "u");
        let removed = fixture
            .wait_for(|_| {
                let removed = records.removed.lock().unwrap().clone();
                (!removed.is_empty()).then_some(removed)
            })
            .await;
        assert_eq!(removed, ["orphaned"]);
    });
}

#[test]
fn unreachable_orphaned_sandbox_is_killed() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        fixture.api.lock().unwrap().deleted = true;
        let _sync_loop = start(&mut fixture, "another");
        tokio::time::sleep(Duration::from_secs(1)).await;
        let orphan = fixture.launcher.start();
        orphan.report(pod_protocol::PodState {
            containers: vec![Default::default()],
            ..Default::default()
        });
        fixture
            .wait_for(|_| orphan.stops.lock().unwrap().first().cloned())
            .await;
        orphan.disconnect();
        let records = Arc::clone(&fixture.launcher.records);
        let is_removed = || !records.removed.lock().unwrap().is_empty();
        fixture
            .wait_for(|_| (*orphan.killed.lock().unwrap() && is_removed()).then_some(()))
            .await;
    });
}

#[test]
fn pod_missing_in_list_is_removed() {
    simulate(async {
        let mut fixture = Fixture::with_pod(pod());
        let pod_manager = Arc::clone(&fixture.shared.pod_manager);
        let mut earlier = pod();
        earlier["metadata"]["uid"] = json!("earlier");
        let earlier = serde_json::from_value(earlier).unwrap();
        pod_manager.update_pod("earlier", Arc::new(earlier));
        let _sync_loop = start(&mut fixture, "u");
        fixture.sandbox(0).await;
        assert!(pod_manager.get("earlier").is_none());
        assert!(pod_manager.get("u").is_some());
    });
}

/// A pod with a volume of a missing config map.
fn pod_with_missing_volume() -> Value {
    let mut pod = pod();
    let spec = &mut pod["spec"];
    spec["volumes"] = json!([{ "name": "v", "configMap": { "name": "missing" } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    pod
}

#[test]
fn new_pod_waits_for_volumes_unlike_running_pod() {
    simulate(async {
        let mut adopted = pod_with_missing_volume();
        adopted["status"] = json!({ "phase": "Running", "startTime": "2026-01-01T00:00:00Z" });
        let mut fixture = Fixture::with_pod(adopted);
        let sandbox = fixture.launcher.start();
        sandbox.report(pod_protocol::PodState {
            containers: vec![Default::default()],
            ..Default::default()
        });
        let _sync_loop = start(&mut fixture, "u");
        let bundle = fixture
            .wait_for(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
        assert!(bundle.volumes.is_empty());
    });
    simulate(async {
        let mut fixture = Fixture::with_pod(pod_with_missing_volume());
        let _sync_loop = start(&mut fixture, "u");
        let sandbox = fixture.sandbox(0).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(sandbox.bundles.lock().unwrap().is_empty());
    });
}

#[test]
fn terminated_pod_is_not_resolved() {
    simulate(async {
        let mut terminated = pod_with_missing_volume();
        terminated["status"] = json!({ "phase": "Succeeded", "startTime": "2026-01-01T00:00:00Z" });
        let mut fixture = Fixture::with_pod(terminated);
        let _sync_loop = start(&mut fixture, "u");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let paths = fixture.api.lock().unwrap().requested_paths.clone();
        assert!(
            !paths.iter().any(|path| path.contains("configmaps")),
            "{paths:?}"
        );
        assert!(fixture.api.lock().unwrap().events.is_empty());
        assert!(fixture.launcher.started().is_empty());
    });
}

#[test]
fn deleted_pod_uses_no_resources() {
    simulate(async {
        let fixture = Fixture::with_pod(pod());
        let (_sender, shutdown) = watch::channel(None);
        let mut sync_loop = SyncLoop {
            shared: Arc::clone(&fixture.shared),
            workers: HashMap::new(),
            tasks: JoinSet::new(),
            early_sandboxes: HashMap::new(),
            synced: true,
            shutdown,
        };
        let named = |uid: &str| -> Pod {
            let mut pod: Pod = serde_json::from_value(pod()).unwrap();
            pod.metadata.uid = Some(uid.to_owned());
            pod
        };
        sync_loop.pod_updated(named("one"));
        assert_eq!(sync_loop.others(&named("two")).len(), 1);
        // Its worker is still cleaning up.
        sync_loop.pod_deleted(named("one"));
        assert!(sync_loop.others(&named("two")).is_empty());
        assert_eq!(sync_loop.workers.len(), 1);
    });
}
