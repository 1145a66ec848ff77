//! Pods come, go and are found again, with a simulated API server and simulated sandboxes, in simulated time.

use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, LocalSet};

use super::*;
use crate::pods::simulation::World;

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

/// Manages the world's pods; `uid` is whose sandboxes those that dial are.
fn begin(world: &mut World, uid: &'static str) -> (oneshot::Sender<Instant>, JoinHandle<()>) {
    let (dialled, sandboxes) = mpsc::unbounded_channel();
    let mut connections = world.connections.take().unwrap();
    tokio::task::spawn_local(async move {
        while let Some(mut caller) = connections.recv().await {
            caller.uid = uid.to_owned();
            let _ = dialled.send(caller);
        }
    });
    let (shutdown, told) = oneshot::channel();
    let shutdown_told = async { told.await.unwrap() };
    let managing = manage(Arc::clone(&world.shared), sandboxes, shutdown_told);
    (shutdown, tokio::task::spawn_local(managing))
}

#[test]
fn a_pod_that_is_listed_is_given_a_sandbox_and_its_bundle() {
    simulate(async {
        let mut world = World::with(pod());
        let _managing = begin(&mut world, "u");
        let sandbox = world.sandbox(0).await;
        world
            .until(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
    });
}

#[test]
fn a_sandbox_that_dials_before_its_pod_is_known_is_adopted() {
    simulate(async {
        let mut inherited = pod();
        inherited["status"] = json!({ "phase": "Running", "startTime": "2026-01-01T00:00:00Z" });
        let mut world = World::with(inherited);
        world.api.lock().unwrap().away = true;
        let _managing = begin(&mut world, "u");
        let sandbox = world.sandboxes.start();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(sandbox.stops.lock().unwrap().is_empty());
        world.api.lock().unwrap().away = false;
        world
            .until(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
    });
}

#[test]
fn a_sandbox_of_no_pod_is_seen_off() {
    simulate(async {
        let mut world = World::with(pod());
        world.api.lock().unwrap().deleted = true;
        let _managing = begin(&mut world, "another");
        tokio::time::sleep(Duration::from_secs(1)).await;
        let orphan = world.sandboxes.start();
        // It has never begun, so there is nothing to wait for.
        world
            .until(|_| orphan.dismissed.lock().unwrap().then_some(()))
            .await;
        assert_eq!(orphan.stops.lock().unwrap().len(), 1);
    });
}

#[test]
fn the_end_waits_for_pods_but_not_for_ever() {
    simulate(async {
        let mut world = World::with(pod());
        let (shutdown, managing) = begin(&mut world, "u");
        let sandbox = world.sandbox(0).await;
        world
            .until(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
        let start = Instant::now();
        shutdown.send(start + Duration::from_secs(10)).unwrap();
        let stop = world
            .until(|_| sandbox.stops.lock().unwrap().first().cloned())
            .await;
        // Less than the pod's own grace, and time is left for its last words.
        assert_eq!(stop.grace_seconds, 8);
        managing.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), 10);
    });
}

#[test]
fn the_end_is_quick_when_pods_are() {
    simulate(async {
        let mut world = World::with(pod());
        let (shutdown, managing) = begin(&mut world, "u");
        let sandbox = world.sandbox(0).await;
        world
            .until(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
        let start = Instant::now();
        shutdown.send(start + Duration::from_secs(10)).unwrap();
        let stop = world
            .until(|_| sandbox.stops.lock().unwrap().first().cloned())
            .await;
        sandbox.say(pod_protocol::PodState {
            finished: true,
            failure: stop.failure,
            ..Default::default()
        });
        managing.await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(2));
        assert!(*sandbox.dismissed.lock().unwrap());
        assert_eq!(
            world.api.lock().unwrap().pod["status"]["reason"],
            "Terminated"
        );
    });
}

#[test]
fn what_is_left_of_pods_that_are_no_more_is_removed() {
    simulate(async {
        let mut world = World::with(pod());
        let pods = world.shared.config.node_dir.join("pods");
        for uid in ["u", "forgotten"] {
            std::fs::create_dir_all(pods.join(uid).join("volumes")).unwrap();
        }
        let _managing = begin(&mut world, "u");
        world
            .until(|_| (!pods.join("forgotten").exists()).then_some(()))
            .await;
        assert!(pods.join("u").exists());
    });
}

#[test]
fn a_sandbox_of_no_pod_that_can_not_be_asked_is_killed() {
    simulate(async {
        let mut world = World::with(pod());
        world.api.lock().unwrap().deleted = true;
        let dir = world.shared.config.node_dir.join("pods/another");
        let _managing = begin(&mut world, "another");
        tokio::time::sleep(Duration::from_secs(1)).await;
        std::fs::create_dir_all(&dir).unwrap();
        let orphan = world.sandboxes.start();
        orphan.say(pod_protocol::PodState {
            containers: vec![Default::default()],
            ..Default::default()
        });
        world
            .until(|_| orphan.stops.lock().unwrap().first().cloned())
            .await;
        orphan.break_line();
        world
            .until(|_| (*orphan.killed.lock().unwrap() && !dir.exists()).then_some(()))
            .await;
    });
}

#[test]
fn a_pod_whose_end_was_missed_is_not_shown_any_more() {
    simulate(async {
        let mut world = World::with(pod());
        let known = Arc::clone(&world.shared.known);
        let mut earlier = pod();
        earlier["metadata"]["uid"] = json!("earlier");
        let earlier = serde_json::from_value(earlier).unwrap();
        known.seen("earlier", Arc::new(earlier));
        let _managing = begin(&mut world, "u");
        world.sandbox(0).await;
        assert!(known.shown("earlier").is_none());
        assert!(known.shown("u").is_some());
    });
}

/// A pod with a volume of a config map that is not there.
fn lacks_a_volume() -> Value {
    let mut pod = pod();
    let spec = &mut pod["spec"];
    spec["volumes"] = json!([{ "name": "v", "configMap": { "name": "missing" } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    pod
}

#[test]
fn a_pod_that_runs_is_told_what_can_be_had_and_a_new_one_waits_for_all() {
    simulate(async {
        let mut inherited = lacks_a_volume();
        inherited["status"] = json!({ "phase": "Running", "startTime": "2026-01-01T00:00:00Z" });
        let mut world = World::with(inherited);
        let sandbox = world.sandboxes.start();
        sandbox.say(pod_protocol::PodState {
            containers: vec![Default::default()],
            ..Default::default()
        });
        let _managing = begin(&mut world, "u");
        let bundle = world
            .until(|_| sandbox.bundles.lock().unwrap().first().cloned())
            .await;
        assert!(bundle.volumes.is_empty());
    });
    simulate(async {
        let mut world = World::with(lacks_a_volume());
        let _managing = begin(&mut world, "u");
        let sandbox = world.sandbox(0).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(sandbox.bundles.lock().unwrap().is_empty());
    });
}

#[test]
fn nothing_is_asked_for_a_pod_that_is_over() {
    simulate(async {
        let mut over = lacks_a_volume();
        over["status"] = json!({ "phase": "Succeeded", "startTime": "2026-01-01T00:00:00Z" });
        let mut world = World::with(over);
        let _managing = begin(&mut world, "u");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let asked = world.api.lock().unwrap().asked.clone();
        assert!(
            !asked.iter().any(|path| path.contains("configmaps")),
            "{asked:?}"
        );
        assert!(world.api.lock().unwrap().events.is_empty());
        assert!(world.sandboxes.all.lock().unwrap().is_empty());
    });
}

#[test]
fn a_pod_that_is_shown_no_longer_takes_no_room_from_others() {
    simulate(async {
        let world = World::with(pod());
        let (_tell, shutdown) = watch::channel(None);
        let mut manager = Manager {
            shared: Arc::clone(&world.shared),
            workers: HashMap::new(),
            tasks: JoinSet::new(),
            early: HashMap::new(),
            listed_once: true,
            shutdown,
        };
        let named = |uid: &str| -> Pod {
            let mut pod: Pod = serde_json::from_value(pod()).unwrap();
            pod.metadata.uid = Some(uid.to_owned());
            pod
        };
        manager.seen(named("one"));
        assert_eq!(manager.others(&named("two")).len(), 1);
        // Its worker is still clearing up.
        manager.gone(named("one"));
        assert!(manager.others(&named("two")).is_empty());
        assert_eq!(manager.workers.len(), 1);
    });
}
