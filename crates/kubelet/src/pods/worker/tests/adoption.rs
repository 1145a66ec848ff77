//! Pods and sandboxes of an earlier kubelet.

use super::*;

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
