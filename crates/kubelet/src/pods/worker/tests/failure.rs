//! Pods that their node ends: deadline, eviction, shutdown.

use super::*;

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
