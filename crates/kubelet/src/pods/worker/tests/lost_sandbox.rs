//! Sandboxes that are lost or disconnected.

use super::*;

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
