//! Statuses and Events.

use super::*;

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
