//! How a pod is rejected, or its sandbox launched and given the bundle.

use super::*;

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
