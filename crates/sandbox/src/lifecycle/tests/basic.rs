//! Start, restart, end.

use serde_json::json;

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod};
use Script::{Exits, FailsToStart, StopsOnSignal, OomKilled, IgnoresSignals};

pod_test! {
    async fn a_container_runs_and_is_stopped() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        let state = pod.at(1).await;
        assert!(state.sandbox_ready);
        assert_eq!(state.pod_ips, ["10.0.0.7"]);
        assert_eq!(state.observed_generation, Some(1));
        assert_eq!(pod.summary("a"), "running ready");
        let status = pod.status("a");
        assert_eq!(status.container_id, Some(format!("coracle://{:064x}", 1)));
        assert_eq!(status.image, "docker.io/library/image:1");
        assert_eq!(status.image_id, "docker.io/library/image:1@sha256:00");
        assert_eq!(status.started, Some(true));
        pod.stop(30);
        let state = pod.finish().await;
        assert!(!state.sandbox_ready);
        assert_eq!(pod.summary("a"), "ended Error 143");
        assert_eq!(runtime.log(), ["0 up", "0 pull image:1", "0 start a#0", "1 signal a 15", "1 exit a 143", "1 down"]);
        assert_eq!(pod.events("a"), [
            "Pulling: Pulling image \"image:1\"",
            "Pulled: Successfully pulled image \"image:1\" in 0s (0s including waiting). Image size: 42 bytes.",
            "Created: Container created",
            "Started: Container started",
            "Killing: Stopping container a",
        ]);
    }
}

pod_test! {
    async fn an_abandoned_pod_is_left_for_the_next_sandbox() {
        let runtime = SimulatedRuntime::new().script("a", &[StopsOnSignal(3, 0)]);
        let spec = json!({"containers": [{"name": "a"}], "terminationGracePeriodSeconds": 9});
        let pod = TestPod::new(&runtime, spec);
        pod.at(1).await;
        let (abandoned, state) = tokio::join!(pod.abandon(), pod.at(2));
        assert!(abandoned);
        // While it ends it is not ready, for it can't be reached.
        assert!(!state.sandbox_ready && !state.containers[0].ready);
        assert!(state.containers[0].state.as_ref().is_some_and(|state| state.running.is_some()));
        assert!(!pod.state().finished);
        assert_eq!(pod.summary("a"), "ended Completed 0");
        assert_eq!(runtime.log_of(&["signal", "exit", "start", "down"]), ["0 start a#0", "1 signal a 15", "4 exit a 0"]);
    }
}

pod_test! {
    async fn a_pod_that_ends_is_not_abandoned() {
        for stop_first in [true, false] {
            let runtime = SimulatedRuntime::new().script("a", &[StopsOnSignal(3, 0)]);
            let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
            pod.at(1).await;
            let stop = async {
                pod.stop(5);
            };
            let abandoned = match stop_first {
                true => {
                    stop.await;
                    pod.abandon().await
                }
                false => tokio::join!(pod.abandon(), stop).0,
            };
            assert!(!abandoned && pod.state().finished);
            assert_eq!(runtime.log_of(&["down"]).len(), 1);
        }
    }
}

pod_test! {
    async fn who_does_not_obey_is_killed() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.stop(5);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["signal", "exit"]), ["1 signal a 15", "6 signal a 9", "6 exit a 137"]);
    }
}

pod_test! {
    async fn a_later_stop_only_shortens() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.stop(60);
        pod.at(10).await;
        pod.stop(100);
        pod.at(20).await;
        pod.stop(3);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["signal"]), ["1 signal a 15", "23 signal a 9"]);
    }
}

pod_test! {
    async fn even_no_grace_is_two_seconds() {
        let runtime = SimulatedRuntime::new().script("a", &[IgnoresSignals]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        pod.stop(0);
        pod.finish().await;
        assert_eq!(runtime.log_of(&["signal"]), ["1 signal a 15", "3 signal a 9"]);
    }
}

pod_test! {
    async fn crashes_are_waited_longer_each_time() {
        let runtime = SimulatedRuntime::new().script("a", &[Exits(1, 3)]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        // It ends at 1, is restarted at once, ends at 2, waits 10 s, ends at 13, waits 20 s, …
        pod.at(3).await;
        assert_eq!(pod.summary("a"), "ended Error 3 (last Error 3) r1");
        pod.at(5).await;
        assert_eq!(pod.summary("a"), "waiting CrashLoopBackOff (last Error 3) r1");
        let waiting = pod.status("a").state.and_then(|state| state.waiting).expect("it waits");
        assert_eq!(
            waiting.message.as_deref(),
            Some("back-off 10s restarting failed container=a pod=p_ns(u)")
        );
        pod.at(800).await;
        let starts: Vec<_> = runtime.log_of(&["start"]);
        assert_eq!(starts, [
            "0 start a#0", "1 start a#1", "12 start a#2", "33 start a#3", "74 start a#4",
            "155 start a#5", "316 start a#6", "617 start a#7",
        ]);
        assert!(pod.events("a").contains(
            &"BackOff: Back-off restarting failed container a in pod p_ns(u)".to_owned()
        ));
        pod.stop(1);
        pod.finish().await;
        assert_eq!(pod.summary("a"), "ended Error 3 (last Error 3) r7");
    }
}

pod_test! {
    async fn ten_good_minutes_reset_the_back_off() {
        let runtime = SimulatedRuntime::new().script("a", &[Exits(1, 1), Exits(1, 1), Exits(601, 1), Exits(5, 1), StopsOnSignal(0, 0)]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(700).await;
        assert_eq!(runtime.log_of(&["start"]), [
            "0 start a#0", "1 start a#1", "12 start a#2", "613 start a#3", "628 start a#4",
        ]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn restart_policies() {
        for (policy, script, want) in [
            ("Never", Exits(1, 0), "ended Completed 0"),
            ("Never", Exits(1, 2), "ended Error 2"),
            ("Never", OomKilled, "ended OOMKilled 137"),
            ("OnFailure", Exits(1, 0), "ended Completed 0"),
        ] {
            let runtime = SimulatedRuntime::new().script("a", &[script]);
            let pod = TestPod::new(&runtime, json!({"restartPolicy": policy, "containers": [{"name": "a"}]}));
            let state = pod.finish().await;
            assert_eq!(pod.summary("a"), want);
            assert_eq!(state.failure, None);
        }
        let runtime = SimulatedRuntime::new().script("a", &[Exits(1, 2), Exits(1, 0)]);
        let pod = TestPod::new(&runtime, json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}]}));
        pod.finish().await;
        assert_eq!(pod.summary("a"), "ended Completed 0 (last Error 2) r1");
        let end = pod.status("a").last_state.and_then(|state| state.terminated).expect("an end");
        assert_eq!(end.message.as_deref(), Some("last words of a"));
    }
}

pod_test! {
    async fn one_that_ends_and_one_that_stays() {
        let runtime = SimulatedRuntime::new().script("a", &[Exits(1, 0)]);
        let pod = TestPod::new(&runtime, json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}));
        let state = pod.at(5).await;
        assert!(!state.finished);
        assert_eq!(pod.summary("a"), "ended Completed 0");
        assert_eq!(pod.summary("b"), "running ready");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn init_containers_run_one_after_the_other() {
        let runtime = SimulatedRuntime::new().script("i", &[Exits(2, 0)]).script("j", &[Exits(3, 1), Exits(3, 0)]);
        let pod = TestPod::new(&runtime, json!({
            "initContainers": [{"name": "i"}, {"name": "j"}],
            "containers": [{"name": "a"}],
        }));
        pod.at(1).await;
        assert_eq!(pod.summary("i"), "running");
        assert_eq!(pod.summary("j"), "waiting PodInitializing");
        assert_eq!(pod.summary("a"), "waiting PodInitializing");
        pod.at(10).await;
        assert_eq!(pod.summary("i"), "ended Completed 0 ready");
        assert_eq!(pod.summary("j"), "ended Completed 0 (last Error 1) r1 ready");
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["start"]), ["0 start i#0", "2 start j#0", "5 start j#1", "8 start a#0"]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn a_failed_init_container_ends_a_pod_that_is_never_restarted() {
        let runtime = SimulatedRuntime::new().script("i", &[Exits(2, 1)]);
        let pod = TestPod::new(&runtime, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        pod.finish().await;
        assert_eq!(pod.summary("i"), "ended Error 1");
        assert_eq!(pod.summary("a"), "waiting PodInitializing");
        assert_eq!(runtime.log_of(&["start"]), ["0 start i#0"]);
    }
}

pod_test! {
    async fn stopping_ends_an_init_container() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        pod.at(1).await;
        pod.stop(5);
        pod.finish().await;
        assert_eq!(pod.summary("i"), "ended Error 143");
        assert_eq!(runtime.log_of(&["start"]), ["0 start i#0"]);
    }
}

pod_test! {
    async fn a_program_that_can_not_be_run_counts_as_a_run() {
        let runtime = SimulatedRuntime::new().script("a", &[FailsToStart("StartError", "no such file")]);
        let pod = TestPod::new(&runtime, json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        pod.finish().await;
        assert_eq!(pod.summary("a"), "ended StartError 128");
        // The container was there, as its status says.
        let status = pod.status("a");
        let end = status.state.unwrap().terminated.unwrap();
        assert!(status.container_id.is_some());
        assert_eq!(end.container_id, status.container_id);
        let runtime = SimulatedRuntime::new().script("a", &[FailsToStart("RunContainerError", "no such file")]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(6).await;
        assert_eq!(pod.summary("a"), "waiting CrashLoopBackOff (last StartError 128) r1");
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn what_can_not_be_created_is_tried_again() {
        let runtime = SimulatedRuntime::new().script("a", &[FailsToStart("CreateContainerError", "no room"), StopsOnSignal(0, 0)]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        pod.at(1).await;
        assert_eq!(pod.summary("a"), "waiting CreateContainerError");
        pod.at(11).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(runtime.log_of(&["start"]), ["0 start a#0", "10 start a#0"]);
        pod.stop(1);
        pod.finish().await;
        assert!(pod.events("a").contains(&"Failed: Error: no room".to_owned()));
    }
}

pod_test! {
    async fn the_active_deadline_fails_the_pod() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({"activeDeadlineSeconds": 5, "containers": [{"name": "a"}]}));
        pod.at(4).await;
        assert_eq!(pod.summary("a"), "running ready");
        let state = pod.finish().await;
        assert_eq!(runtime.now(), 5);
        let failure = state.failure.expect("it failed");
        assert_eq!(failure.reason, "DeadlineExceeded");
        assert_eq!(failure.message, "Pod was active on the node longer than the specified deadline");
    }
}

pod_test! {
    async fn a_pod_that_does_not_come_up_is_tried_again() {
        let runtime = SimulatedRuntime::new();
        runtime.ups.borrow_mut().extend([("", "no network"), ("FailedMount", "no volume")]);
        let pod = TestPod::new(&runtime, json!({"containers": [{"name": "a"}]}));
        let state = pod.at(0).await;
        assert!(!state.sandbox_ready);
        assert_eq!(pod.summary("a"), "waiting ContainerCreating");
        let state = pod.at(5).await;
        assert_eq!(runtime.log_of(&["up", "start"]), ["0 up", "1 up", "3 up", "3 start a#0"]);
        let events: Vec<_> = state.events.iter().take(2).map(|e| (e.reason.as_str(), e.message.as_str())).collect();
        assert_eq!(events, [
            ("FailedCreatePodSandBox", "Failed to create pod sandbox: no network"),
            ("FailedMount", "no volume"),
        ]);
        pod.stop(1);
        pod.finish().await;
    }
}

pod_test! {
    async fn an_empty_pod_is_over_at_once() {
        let runtime = SimulatedRuntime::new();
        let pod = TestPod::new(&runtime, json!({}));
        pod.finish().await;
    }
}
