//! The life of a pod as its worker sees it, with a simulated sandbox and API server, in simulated time.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::PodEvent;
use serde_json::{Value, json};
use tokio::task::{JoinHandle, LocalSet};

use super::*;
use crate::pods::simulation::World;

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

fn hire(world: &mut World, beginning: Beginning) -> JoinHandle<()> {
    let ears = Ears {
        seen: world.seen.clone(),
        offers: world.offers.subscribe(),
        connections: world.connections.take().unwrap(),
        shutdown: world.shutdown.subscribe(),
    };
    let shared = Arc::clone(&world.shared);
    tokio::task::spawn_local(Worker::run(shared, ears, beginning))
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

fn ended(code: i32) -> PodState {
    PodState {
        finished: true,
        ..state(json!({
            "containerID": "coracle://1", "state": { "terminated": { "exitCode": code } },
        }))
    }
}

async fn bundles(world: &World, sandbox: usize, count: usize) {
    let sandbox = world.sandbox(sandbox).await;
    world
        .until(|_| (sandbox.bundles.lock().unwrap().len() >= count).then_some(()))
        .await;
}

async fn stopped(world: &World, sandbox: usize) -> Stop {
    let sandbox = world.sandbox(sandbox).await;
    world
        .until(|_| sandbox.stops.lock().unwrap().last().cloned())
        .await
}

/// A pod that runs.
async fn started(policy: &str) -> (World, JoinHandle<()>) {
    let mut world = World::with(pod(policy));
    let worker = hire(&mut world, Beginning::Admitted);
    world.resolve();
    bundles(&world, 0, 1).await;
    world.sandbox(0).await.say(running());
    world.phase("Running").await;
    (world, worker)
}

fn to_be_deleted(pod: &mut Value, grace: i64) {
    pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:01:00Z");
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
}

#[test]
fn a_pod_runs_and_succeeds_and_stays_for_its_logs_without_its_sandbox() {
    simulate(async {
        let (world, worker) = started("Never").await;
        let status = world.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["podIP"], "100.64.0.5");
        assert_eq!(status["hostIP"], "10.0.0.1");
        assert!(status["startTime"].is_string());

        world.sandbox(0).await.say(ended(0));
        world.phase("Succeeded").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!worker.is_finished());
        let sandbox = world.sandbox(0).await;
        assert!(*sandbox.retired.lock().unwrap());
        assert!(!*sandbox.dismissed.lock().unwrap());
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);

        // What is true of the pod as a whole is still told.
        world.edit(|pod| pod["metadata"]["generation"] = json!(2));
        world
            .until(|world| {
                let api = world.api.lock().unwrap();
                (api.pod["status"]["observedGeneration"] == 2).then_some(())
            })
            .await;
        assert_eq!(
            world.api.lock().unwrap().pod["status"]["phase"],
            "Succeeded"
        );
        world.edit(|pod| to_be_deleted(pod, 30));
        worker.await.unwrap();
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn statuses_are_written_once_each() {
    simulate(async {
        let (world, _worker) = started("Never").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        let statuses = world.api.lock().unwrap().statuses.clone();
        let phases: Vec<_> = statuses.iter().map(|s| s["phase"].clone()).collect();
        assert_eq!(phases.last().unwrap(), "Running");
        assert!(phases.len() <= 3, "{phases:?}");
    });
}

#[test]
fn a_grace_beyond_every_clock_is_a_long_one() {
    simulate(async {
        let (world, worker) = started("Always").await;
        world.edit(|pod| to_be_deleted(pod, i64::MAX));
        assert!(stopped(&world, 0).await.grace_seconds >= 86_400);
        world.sandbox(0).await.say(ended(143));
        worker.await.unwrap();
    });
}

#[test]
fn a_deleted_pod_is_stopped_then_recorded_then_removed_then_dismissed() {
    simulate(async {
        let (world, worker) = started("Always").await;
        world.edit(|pod| to_be_deleted(pod, 7));
        let stop = stopped(&world, 0).await;
        assert_eq!((stop.grace_seconds, stop.failure), (7, None));
        assert!(!world.api.lock().unwrap().deleted);

        // A shorter grace is passed on.
        world.edit(|pod| to_be_deleted(pod, 2));
        let sandbox = world.sandbox(0).await;
        world
            .until(|_| (sandbox.stops.lock().unwrap().len() == 2).then_some(()))
            .await;

        sandbox.say(ended(143));
        worker.await.unwrap();
        let api = world.api.lock().unwrap();
        assert!(api.deleted);
        assert_eq!(api.statuses.last().unwrap()["phase"], "Failed");
        assert!(*sandbox.dismissed.lock().unwrap());
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn a_share_of_the_node_is_given_back_when_its_pod_is_over() {
    simulate(async {
        let mut pod = pod("Never");
        pod["metadata"]["annotations"] = json!({ "coracle.dev/launcher": "step" });
        let mut world = World::with(pod);
        let worker = hire(&mut world, Beginning::Admitted);
        world.resolve();
        bundles(&world, 0, 1).await;
        let sandbox = world.sandbox(0).await;
        sandbox.say(ended(3));
        world
            .until(|_| sandbox.retired.lock().unwrap().then_some(()))
            .await;
        // Only once the API server knows how the pod ended: after that nobody could tell it.
        assert_eq!(
            world.api.lock().unwrap().pod["status"]["phase"],
            json!("Failed")
        );
        tokio::time::sleep(Duration::from_secs(600)).await;
        let status = world.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["phase"], "Failed");
        assert_eq!(
            status["containerStatuses"][0]["state"]["terminated"]["exitCode"],
            3
        );
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);

        world.edit(|pod| to_be_deleted(pod, 30));
        worker.await.unwrap();
        assert!(world.api.lock().unwrap().deleted);
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn a_pod_that_vanishes_is_stopped_and_dismissed() {
    simulate(async {
        let (world, worker) = started("Always").await;
        let dir = world.shared.config.node_dir.join("pods/u");
        std::fs::create_dir_all(dir.join("memory")).unwrap();
        world.vanish();
        assert_eq!(stopped(&world, 0).await.grace_seconds, 30);
        let sandbox = world.sandbox(0).await;
        sandbox.say(ended(143));
        worker.await.unwrap();
        assert!(*sandbox.dismissed.lock().unwrap());
        assert!(!dir.exists());
    });
}

#[test]
fn a_pod_deleted_before_it_began_is_removed_at_once() {
    simulate(async {
        let mut world = World::with(pod("Always"));
        world.edit(|pod| to_be_deleted(pod, 30));
        hire(&mut world, Beginning::Admitted).await.unwrap();
        assert!(world.api.lock().unwrap().deleted);
        assert!(world.sandboxes.all.lock().unwrap().is_empty());
    });
}

#[test]
fn a_pod_deleted_before_it_was_resolved_loses_its_sandbox() {
    simulate(async {
        let mut world = World::with(pod("Always"));
        let worker = hire(&mut world, Beginning::Admitted);
        let sandbox = world.sandbox(0).await;
        world.edit(|pod| to_be_deleted(pod, 30));
        worker.await.unwrap();
        let dismissed = *sandbox.dismissed.lock().unwrap();
        assert!(dismissed || *sandbox.killed.lock().unwrap());
        assert!(world.api.lock().unwrap().deleted);
    });
}

#[test]
fn a_sandbox_that_never_began_is_found_out_and_dismissed() {
    simulate(async {
        let mut world = inherited("Always");
        world.edit(|pod| to_be_deleted(pod, 30));
        let worker = hire(&mut world, Beginning::Inherited);
        let sandbox = world.sandboxes.start();
        worker.await.unwrap();
        assert!(*sandbox.dismissed.lock().unwrap());
        assert!(sandbox.stops.lock().unwrap().is_empty());
    });
}

#[test]
fn a_sandbox_that_dies_is_replaced_if_the_policy_says_so() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        world.sandbox(0).await.die();
        bundles(&world, 1, 1).await;
        let second = world.sandbox(1).await;
        let before = second.bundles.lock().unwrap()[0].before.clone();
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
        second.say(again);
        world
            .until(|world| {
                let api = world.api.lock().unwrap();
                let status = &api.pod["status"]["containerStatuses"][0];
                (status["restartCount"] == 1 && status["state"]["running"].is_object())
                    .then_some(())
            })
            .await;
        let events = world.api.lock().unwrap().events.clone();
        assert_eq!(events[0]["reason"], "SandboxChanged");
    });
}

#[test]
fn a_sandbox_that_dies_is_the_end_if_the_policy_says_so() {
    simulate(async {
        let (world, _worker) = started("Never").await;
        world.sandbox(0).await.die();
        world.phase("Failed").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
    });
}

#[test]
fn a_broken_line_is_no_death() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        let sandbox = world.sandbox(0).await;
        sandbox.break_line();
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.sandboxes.dial(&sandbox);
        // It is told everything again.
        bundles(&world, 0, 2).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
        assert!(!*sandbox.killed.lock().unwrap());
    });
}

/// A pod that an earlier kubelet has started.
fn inherited(policy: &str) -> World {
    let mut pod = pod(policy);
    let running = &running().containers[0];
    pod["status"] = json!({
        "phase": "Running", "startTime": "2026-01-01T00:00:00Z", "containerStatuses": [running],
    });
    World::with(pod)
}

#[test]
fn a_sandbox_that_outlived_its_kubelet_is_adopted() {
    simulate(async {
        let mut world = inherited("Never");
        let _worker = hire(&mut world, Beginning::Inherited);
        world.resolve();
        tokio::time::sleep(Duration::from_millis(900)).await;
        let sandbox = world.sandboxes.start();
        sandbox.say(running());
        bundles(&world, 0, 1).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
        let api = world.api.lock().unwrap();
        assert!(
            api.statuses
                .iter()
                .all(|status| status["phase"] == "Running")
        );
        assert!(api.statuses.len() <= 2, "{:#?}", api.statuses);
    });
}

#[test]
fn a_sandbox_that_is_slow_to_dial_is_waited_for() {
    simulate(async {
        let mut world = inherited("Never");
        let sandbox = world.sandboxes.start_silent();
        let _worker = hire(&mut world, Beginning::Inherited);
        world.resolve();
        tokio::time::sleep(Duration::from_secs(40)).await;
        world.sandboxes.dial(&sandbox);
        sandbox.say(running());
        bundles(&world, 0, 1).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
        assert!(!*sandbox.killed.lock().unwrap());
        assert_eq!(world.api.lock().unwrap().pod["status"]["phase"], "Running");
    });
}

#[test]
fn a_sandbox_of_which_the_api_server_was_not_told_is_adopted() {
    simulate(async {
        let mut world = World::with(pod("Never"));
        let sandbox = world.sandboxes.start();
        let _worker = hire(&mut world, Beginning::Admitted);
        world.resolve();
        bundles(&world, 0, 1).await;
        sandbox.say(running());
        world.phase("Running").await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
    });
}

#[test]
fn a_sandbox_that_never_dials_is_killed_before_another_is_started() {
    simulate(async {
        let mut world = inherited("Always");
        let sandbox = world.sandboxes.start_silent();
        let _worker = hire(&mut world, Beginning::Inherited);
        world.resolve();
        bundles(&world, 1, 1).await;
        assert!(*sandbox.killed.lock().unwrap());
    });
}

#[test]
fn of_two_sandboxes_the_one_that_dials_stays() {
    simulate(async {
        let mut world = World::with(pod("Always"));
        let worker = hire(&mut world, Beginning::Admitted);
        let ours = world.sandbox(0).await;
        let other = world.sandboxes.start();
        world.resolve();
        bundles(&world, 1, 1).await;
        assert!(*ours.killed.lock().unwrap());
        other.say(running());
        world.phase("Running").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 2);
        assert!(!*other.killed.lock().unwrap());

        // And its end is noticed as if it were ours.
        other.die();
        world.sandbox(2).await;
        drop(worker);
    });
}

#[test]
fn only_a_pod_that_runs_is_told_what_lacks_a_volume() {
    simulate(async {
        let mut world = World::with(pod("Never"));
        let _worker = hire(&mut world, Beginning::Admitted);
        world.offer(false);
        tokio::time::sleep(Duration::from_secs(30)).await;
        let sandbox = world.sandbox(0).await;
        assert!(sandbox.bundles.lock().unwrap().is_empty());
        world.offer(true);
        bundles(&world, 0, 1).await;
        world.offer(false);
        bundles(&world, 0, 2).await;
    });
    simulate(async {
        let mut world = inherited("Never");
        let sandbox = world.sandboxes.start();
        sandbox.say(running());
        let _worker = hire(&mut world, Beginning::Inherited);
        world.offer(false);
        bundles(&world, 0, 1).await;
    });
}

#[test]
fn a_pod_whose_sandbox_did_not_outlive_its_kubelet_is_started_anew() {
    simulate(async {
        let mut world = inherited("Always");
        let _worker = hire(&mut world, Beginning::Inherited);
        world.resolve();
        bundles(&world, 0, 1).await;
        let before = world.sandbox(0).await.bundles.lock().unwrap()[0]
            .before
            .clone();
        assert_eq!(before.len(), 1);
        let statuses = world.api.lock().unwrap().statuses.clone();
        assert!(statuses.iter().all(|status| status["phase"] != "Pending"));
    });
}

#[test]
fn a_pod_that_succeeded_unheard_is_not_run_again() {
    simulate(async {
        for beginning in [Beginning::Inherited, Beginning::Admitted] {
            let mut world = match beginning {
                Beginning::Inherited => inherited("Never"),
                // The earlier kubelet could not even say that it took the pod.
                _ => World::with(pod("Never")),
            };
            *world.sandboxes.checkpoint.lock().unwrap() = Some(ended(0));
            let _worker = hire(&mut world, beginning);
            world.resolve();
            world.phase("Succeeded").await;
            tokio::time::sleep(Duration::from_secs(600)).await;
            assert_eq!(world.sandboxes.all.lock().unwrap().len(), 0);
            let api = world.api.lock().unwrap();
            assert!(
                api.statuses
                    .iter()
                    .all(|status| status["phase"] != "Failed")
            );
        }
    });
}

#[test]
fn a_lost_container_keeps_the_exit_code_of_its_checkpoint() {
    simulate(async {
        for policy in ["Never", "OnFailure"] {
            let mut world = inherited(policy);
            let mut left = ended(5);
            left.finished = false;
            *world.sandboxes.checkpoint.lock().unwrap() = Some(left);
            let _worker = hire(&mut world, Beginning::Inherited);
            world.resolve();
            if policy == "Never" {
                world.phase("Failed").await;
                let api = world.api.lock().unwrap();
                let state = &api.pod["status"]["containerStatuses"][0]["state"];
                assert_eq!(state["terminated"]["exitCode"], 5, "{state}");
                continue;
            }
            bundles(&world, 0, 1).await;
            let bundle = world.sandbox(0).await.bundles.lock().unwrap()[0].clone();
            let state = bundle.before[0].state.clone().unwrap();
            assert_eq!(state.terminated.unwrap().exit_code, 5);
        }
    });
}

#[test]
fn what_is_said_while_the_api_server_is_away_is_told_later_and_only_the_newest() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        let count = world.api.lock().unwrap().statuses.len();
        world.api.lock().unwrap().away = true;
        for restarts in 1..20 {
            let mut state = running();
            state.containers[0].restart_count = restarts;
            world.sandbox(0).await.say(state);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        world.api.lock().unwrap().away = false;
        world
            .until(|world| {
                let api = world.api.lock().unwrap();
                (api.pod["status"]["containerStatuses"][0]["restartCount"] == 19).then_some(())
            })
            .await;
        assert_eq!(world.api.lock().unwrap().statuses.len(), count + 1);
    });
}

#[test]
fn a_condition_that_somebody_overwrote_is_set_right() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        // As the node controller does when a node was away.
        world.edit(|pod| {
            for condition in pod["status"]["conditions"].as_array_mut().unwrap() {
                if condition["type"] == "Ready" {
                    condition["status"] = json!("False");
                }
            }
        });
        world
            .until(|world| {
                let api = world.api.lock().unwrap();
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
fn a_deadline_is_kept_while_the_sandbox_knows_nothing_of_the_pod() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut world = World::with(pod);
        let begun = Instant::now();
        let worker = hire(&mut world, Beginning::Admitted);
        // It is never resolved: a config map is missing.
        let sandbox = world.sandbox(0).await;
        world.phase("Failed").await;
        assert!((29..=32).contains(&begun.elapsed().as_secs()));
        let api = world.api.lock().unwrap().pod["status"].clone();
        assert_eq!(api["reason"], "DeadlineExceeded");
        assert_eq!(
            api["message"],
            "Pod was active on the node longer than the specified deadline"
        );
        assert!(
            api["conditions"]
                .as_array()
                .unwrap()
                .iter()
                .all(|c| c["type"] != "DisruptionTarget")
        );
        assert!(*sandbox.dismissed.lock().unwrap());
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!worker.is_finished());
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
        let events = world.api.lock().unwrap().events.clone();
        let reasons: Vec<_> = events.iter().map(|event| event["reason"].clone()).collect();
        assert_eq!(reasons, ["DeadlineExceeded"]);
    });
}

#[test]
fn a_deadline_is_kept_without_any_sandbox() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut world = World::with(pod);
        *world.sandboxes.broken.lock().unwrap() = true;
        let _worker = hire(&mut world, Beginning::Admitted);
        world.resolve();
        world.phase("Failed").await;
        let api = world.api.lock().unwrap().pod["status"].clone();
        assert_eq!(api["reason"], "DeadlineExceeded");
    });
}

#[test]
fn a_deadline_is_the_sandboxs_own_once_it_knows_the_pod() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["activeDeadlineSeconds"] = json!(30);
        let mut world = World::with(pod);
        let _worker = hire(&mut world, Beginning::Admitted);
        world.resolve();
        bundles(&world, 0, 1).await;
        world.sandbox(0).await.say(running());
        world.phase("Running").await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.api.lock().unwrap().pod["status"]["phase"], "Running");
        assert!(world.sandbox(0).await.stops.lock().unwrap().is_empty());
    });
}

#[test]
fn a_pod_is_evicted() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        let problem = Problem {
            reason: "Evicted".to_owned(),
            message: "The node was low on resource: memory. ".to_owned(),
        };
        let evicted = [("u".to_owned(), problem.clone())].into();
        world.shared.evicted.send_replace(evicted);
        let stop = stopped(&world, 0).await;
        assert_eq!(
            (stop.grace_seconds, stop.failure.as_ref()),
            (1, Some(&problem))
        );
        world.sandbox(0).await.say(PodState {
            failure: stop.failure,
            ..ended(137)
        });
        world.phase("Failed").await;
        let status = world.api.lock().unwrap().pod["status"].clone();
        assert_eq!(status["reason"], "Evicted");
        let conditions = status["conditions"].as_array().unwrap();
        assert!(conditions.iter().any(|c| c["type"] == "DisruptionTarget"));
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.sandboxes.all.lock().unwrap().len(), 1);
        let events = world.api.lock().unwrap().events.clone();
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
fn a_pod_is_started_by_the_runtime_that_it_asks_for_or_not_at_all() {
    simulate(async {
        for (class, message) in [
            (
                "theirs",
                "Failed to create pod sandbox: failed to get sandbox runtime: no runtime for \"kata\" is configured",
            ),
            (
                "none",
                "Failed to create pod sandbox: runtimeclass.node.k8s.io \"none\" not found",
            ),
        ] {
            let mut pod = pod("Always");
            pod["spec"]["runtimeClassName"] = json!(class);
            let mut world = World::with(pod);
            let _worker = hire(&mut world, Beginning::Admitted);
            world.resolve();
            let event = world
                .until(|world| world.api.lock().unwrap().events.first().cloned())
                .await;
            assert_eq!(event["reason"], "FailedCreatePodSandBox");
            assert_eq!(event["message"], message);
            assert!(world.sandboxes.all.lock().unwrap().is_empty());
        }
        let mut pod = pod("Always");
        pod["spec"]["runtimeClassName"] = json!("ours");
        let mut world = World::with(pod);
        let _worker = hire(&mut world, Beginning::Admitted);
        world.resolve();
        bundles(&world, 0, 1).await;
    });
}

#[test]
fn the_node_goes_down_and_pods_with_it() {
    simulate(async {
        let (world, worker) = started("Always").await;
        let until = Instant::now() + Duration::from_secs(10);
        world.shutdown.send_replace(Some(until));
        let stop = stopped(&world, 0).await;
        assert_eq!(stop.failure.as_ref().unwrap().reason, "Terminated");
        assert!((8..=10).contains(&stop.grace_seconds));
        let sandbox = world.sandbox(0).await;
        sandbox.say(PodState {
            failure: stop.failure,
            ..ended(143)
        });
        worker.await.unwrap();
        let api = world.api.lock().unwrap();
        let status = &api.pod["status"];
        assert_eq!(status["phase"], "Failed");
        assert_eq!(status["reason"], "Terminated");
        assert!(!api.deleted);
        assert!(*sandbox.dismissed.lock().unwrap());
    });
}

#[test]
fn a_refused_pod_is_told_why_and_gets_no_sandbox() {
    simulate(async {
        let mut world = World::with(pod("Always"));
        let problem = Problem {
            reason: "OutOfcpu".to_owned(),
            message: "none left".to_owned(),
        };
        let worker = hire(&mut world, Beginning::Refused(problem));
        world.phase("Failed").await;
        world
            .until(|world| {
                let api = world.api.lock().unwrap();
                (!api.events.is_empty()).then_some(())
            })
            .await;
        assert_eq!(
            world.api.lock().unwrap().pod["status"]["reason"],
            "OutOfcpu"
        );
        assert!(world.sandboxes.all.lock().unwrap().is_empty());
        world.edit(|pod| to_be_deleted(pod, 30));
        worker.await.unwrap();
        assert!(world.api.lock().unwrap().deleted);
    });
}

#[test]
fn a_label_set_just_before_counts() {
    simulate(async {
        let mut pod = pod("Always");
        pod["spec"]["nodeSelector"] = json!({ "new": "yes" });
        let mut world = World::with(pod);
        world.api.lock().unwrap().node["metadata"]["labels"] = json!({ "new": "yes" });
        let problem = Problem {
            reason: "NodeAffinity".to_owned(),
            message: String::new(),
        };
        let _worker = hire(&mut world, Beginning::Doubtful(problem));
        world.sandbox(0).await;
    });
}

#[test]
fn a_sandbox_that_cannot_be_started_is_tried_again() {
    simulate(async {
        let mut world = World::with(pod("Always"));
        *world.sandboxes.broken.lock().unwrap() = true;
        let _worker = hire(&mut world, Beginning::Admitted);
        world
            .until(|world| {
                let api = world.api.lock().unwrap();
                (!api.events.is_empty()).then_some(())
            })
            .await;
        let event = world.api.lock().unwrap().events[0].clone();
        assert_eq!(event["reason"], "FailedCreatePodSandBox");
        assert_eq!(
            event["message"],
            "Failed to create pod sandbox: cannot start the sandbox: no more processes"
        );
        *world.sandboxes.broken.lock().unwrap() = false;
        world.sandbox(0).await;
    });
}

#[test]
fn events_are_recorded_once() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        let event = |serial| PodEvent {
            serial,
            at: Timestamp::now(),
            warning: false,
            reason: "Started".to_owned(),
            message: format!("Started container {serial}"),
            field_path: Some("spec.containers{a}".to_owned()),
        };
        let sandbox = world.sandbox(0).await;
        let mut state = running();
        for serial in 1..=3 {
            state.events.push(event(serial));
            sandbox.say(state.clone());
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let events = world.api.lock().unwrap().events.clone();
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
fn a_pod_that_others_declare_over_is_ended() {
    simulate(async {
        let (world, _worker) = started("Always").await;
        world.edit(|pod| {
            pod["status"]["phase"] = json!("Failed");
            pod["status"]["reason"] = json!("NodeLost");
        });
        stopped(&world, 0).await;
        world.sandbox(0).await.say(ended(0));
        tokio::time::sleep(Duration::from_secs(60)).await;
        let status = world.api.lock().unwrap().pod["status"].clone();
        assert_eq!(
            (&status["phase"], &status["reason"]),
            (&json!("Failed"), &json!("NodeLost"))
        );
    });
}

#[test]
fn a_sandbox_that_does_not_end_in_time_is_killed() {
    simulate(async {
        let (world, worker) = started("Always").await;
        world.edit(|pod| to_be_deleted(pod, 5));
        worker.await.unwrap();
        assert!(*world.sandbox(0).await.killed.lock().unwrap());
        assert!(world.api.lock().unwrap().deleted);
    });
}
