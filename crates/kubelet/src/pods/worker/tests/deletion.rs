//! How a pod is deleted and how its sandbox ends.

use super::*;

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
