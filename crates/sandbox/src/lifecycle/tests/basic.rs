//! Start, restart and stop.

use pod_protocol::FailureCause;
use serde_json::json;

use crate::lifecycle::simulated_runtime::{ScriptedRun, SimulatedRuntime, TestPod};
use ScriptedRun::{Exits, ExitsOnStop, IgnoresStop, OomKilled, StartFails};

lifecycle_test! {
    async fn container_runs_and_is_stopped() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        let state = pod.advance_to(1).await;
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
        let state = pod.finished().await;
        assert!(!state.sandbox_ready);
        assert_eq!(pod.summary("a"), "terminated Error 143");
        assert_eq!(sim.log(), ["0 set up", "0 pull image:1", "0 start a#0", "1 signal a 15", "1 exit a 143", "1 tear down"]);
        assert_eq!(pod.events("a"), [
            "Pulling: Pulling image \"image:1\"",
            "Pulled: Successfully pulled image \"image:1\" in 0s (0s including waiting). Image size: 42 bytes.",
            "Created: Container created",
            "Started: Container started",
            "Killing: Stopping container a",
        ]);
    }
}

lifecycle_test! {
    async fn abandoned_pod_is_left_for_the_next_sandbox() {
        let sim = SimulatedRuntime::new().script("a", &[ExitsOnStop(3, 0)]);
        let spec = json!({"containers": [{"name": "a"}], "terminationGracePeriodSeconds": 9});
        let pod = TestPod::new(&sim, spec);
        pod.advance_to(1).await;
        let (abandoned, state) = tokio::join!(pod.abandon(), pod.advance_to(2));
        assert!(abandoned);
        // A container that is being killed must not get traffic, so it is not ready.
        assert!(!state.sandbox_ready && !state.containers[0].ready);
        assert!(state.containers[0].state.as_ref().is_some_and(|state| state.running.is_some()));
        assert!(!pod.state().finished);
        // The kill does not count as an exit of the container.
        assert_eq!(pod.summary("a"), "running");
        assert_eq!(sim.log_of(&["signal", "exit", "start", "tear down"]), ["0 start a#0", "1 signal a 15", "4 exit a 0"]);
    }
}

lifecycle_test! {
    async fn abandoned_pod_keeps_running_status_of_killed_containers() {
        let sim = SimulatedRuntime::new().script("a", &[ExitsOnStop(3, 0)]).script("b", &[IgnoresStop]).script("done", &[Exits(1, 0)]);
        let names = ["a", "b", "done"].map(|name| json!({"name": name}));
        let spec = json!({"containers": names, "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 9});
        let pod = TestPod::new(&sim, spec);
        pod.advance_to(2).await;
        let running = ["a", "b"].map(|name| pod.status(name).state);
        assert!(pod.abandon().await);
        assert_eq!(sim.log_of(&["exit"]), ["1 exit done 0", "5 exit a 0", "11 exit b 137"]);
        assert_eq!(pod.summary("done"), "terminated Completed 0");
        for (name, before) in ["a", "b"].into_iter().zip(running) {
            assert_eq!(pod.summary(name), "running");
            assert_eq!(pod.status(name).state, before);
        }
    }
}

lifecycle_test! {
    async fn ending_pod_is_not_abandoned() {
        for stop_first in [true, false] {
            let sim = SimulatedRuntime::new().script("a", &[ExitsOnStop(3, 0)]);
            let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
            pod.advance_to(1).await;
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
            assert_eq!(pod.summary("a"), "terminated Completed 0");
            assert_eq!(sim.log_of(&["tear down"]).len(), 1);
        }
    }
}

lifecycle_test! {
    async fn container_that_ignores_sigterm_is_killed() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.stop(5);
        pod.finished().await;
        assert_eq!(sim.log_of(&["signal", "exit"]), ["1 signal a 15", "6 signal a 9", "6 exit a 137"]);
    }
}

lifecycle_test! {
    async fn later_stop_only_shortens_the_grace_period() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.stop(60);
        pod.advance_to(10).await;
        pod.stop(100);
        pod.advance_to(20).await;
        pod.stop(3);
        pod.finished().await;
        assert_eq!(sim.log_of(&["signal"]), ["1 signal a 15", "23 signal a 9"]);
    }
}

lifecycle_test! {
    async fn grace_period_is_at_least_two_seconds() {
        let sim = SimulatedRuntime::new().script("a", &[IgnoresStop]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        pod.stop(0);
        pod.finished().await;
        assert_eq!(sim.log_of(&["signal"]), ["1 signal a 15", "3 signal a 9"]);
    }
}

lifecycle_test! {
    async fn restart_delay_grows_with_each_crash() {
        let sim = SimulatedRuntime::new().script("a", &[Exits(1, 3)]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        // The container exits at 1, restarts at once, exits at 2, waits 10 s, exits at 13, waits 20 s, …
        pod.advance_to(3).await;
        assert_eq!(pod.summary("a"), "terminated Error 3 (last Error 3) r1");
        pod.advance_to(5).await;
        assert_eq!(pod.summary("a"), "waiting CrashLoopBackOff (last Error 3) r1");
        let waiting = pod.status("a").state.and_then(|state| state.waiting).expect("a waiting state");
        assert_eq!(
            waiting.message.as_deref(),
            Some("back-off 10s restarting failed container=a pod=p_ns(u)")
        );
        pod.advance_to(800).await;
        let starts: Vec<_> = sim.log_of(&["start"]);
        assert_eq!(starts, [
            "0 start a#0", "1 start a#1", "12 start a#2", "33 start a#3", "74 start a#4",
            "155 start a#5", "316 start a#6", "617 start a#7",
        ]);
        assert!(pod.events("a").contains(
            &"BackOff: Back-off restarting failed container a in pod p_ns(u)".to_owned()
        ));
        pod.stop(1);
        pod.finished().await;
        assert_eq!(pod.summary("a"), "terminated Error 3 (last Error 3) r7");
    }
}

lifecycle_test! {
    async fn ten_minutes_of_running_reset_the_back_off() {
        let sim = SimulatedRuntime::new().script("a", &[Exits(1, 1), Exits(1, 1), Exits(601, 1), Exits(5, 1), ExitsOnStop(0, 0)]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(700).await;
        assert_eq!(sim.log_of(&["start"]), [
            "0 start a#0", "1 start a#1", "12 start a#2", "613 start a#3", "628 start a#4",
        ]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn restarts_follow_the_restart_policy() {
        for (policy, script, want) in [
            ("Never", Exits(1, 0), "terminated Completed 0"),
            ("Never", Exits(1, 2), "terminated Error 2"),
            ("Never", OomKilled, "terminated OOMKilled 137"),
            ("OnFailure", Exits(1, 0), "terminated Completed 0"),
        ] {
            let sim = SimulatedRuntime::new().script("a", &[script]);
            let pod = TestPod::new(&sim, json!({"restartPolicy": policy, "containers": [{"name": "a"}]}));
            let state = pod.finished().await;
            assert_eq!(pod.summary("a"), want);
            assert_eq!(state.failure, None);
        }
        let sim = SimulatedRuntime::new().script("a", &[Exits(1, 2), Exits(1, 0)]);
        let pod = TestPod::new(&sim, json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}]}));
        pod.finished().await;
        assert_eq!(pod.summary("a"), "terminated Completed 0 (last Error 2) r1");
        let last = pod.status("a").last_state.and_then(|state| state.terminated).expect("a terminated state");
        assert_eq!(last.message.as_deref(), Some("message of a"));
    }
}

lifecycle_test! {
    async fn pod_continues_while_one_container_runs() {
        let sim = SimulatedRuntime::new().script("a", &[Exits(1, 0)]);
        let pod = TestPod::new(&sim, json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}));
        let state = pod.advance_to(5).await;
        assert!(!state.finished);
        assert_eq!(pod.summary("a"), "terminated Completed 0");
        assert_eq!(pod.summary("b"), "running ready");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn init_containers_run_one_after_the_other() {
        let sim = SimulatedRuntime::new().script("i", &[Exits(2, 0)]).script("j", &[Exits(3, 1), Exits(3, 0)]);
        let pod = TestPod::new(&sim, json!({
            "initContainers": [{"name": "i"}, {"name": "j"}],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(1).await;
        assert_eq!(pod.summary("i"), "running");
        assert_eq!(pod.summary("j"), "waiting PodInitializing");
        assert_eq!(pod.summary("a"), "waiting PodInitializing");
        pod.advance_to(10).await;
        assert_eq!(pod.summary("i"), "terminated Completed 0 ready");
        assert_eq!(pod.summary("j"), "terminated Completed 0 (last Error 1) r1 ready");
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#0", "2 start j#0", "5 start j#1", "8 start a#0"]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failed_init_container_ends_never_restarted_pod() {
        let sim = SimulatedRuntime::new().script("i", &[Exits(2, 1)]);
        let pod = TestPod::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        pod.finished().await;
        assert_eq!(pod.summary("i"), "terminated Error 1");
        assert_eq!(pod.summary("a"), "waiting PodInitializing");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#0"]);
    }
}

lifecycle_test! {
    async fn stopping_ends_an_init_container() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        pod.advance_to(1).await;
        pod.stop(5);
        pod.finished().await;
        assert_eq!(pod.summary("i"), "terminated Error 143");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#0"]);
    }
}

lifecycle_test! {
    async fn failed_program_start_counts_as_a_run() {
        let sim = SimulatedRuntime::new().script("a", &[StartFails("StartError", "no such file")]);
        let pod = TestPod::new(&sim, json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        pod.finished().await;
        assert_eq!(pod.summary("a"), "terminated StartError 128");
        // The status shows that a container was created.
        let status = pod.status("a");
        let terminated = status.state.unwrap().terminated.unwrap();
        assert!(status.container_id.is_some());
        assert_eq!(terminated.container_id, status.container_id);
        let sim = SimulatedRuntime::new().script("a", &[StartFails("StartError", "no such file")]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(6).await;
        assert_eq!(pod.summary("a"), "waiting CrashLoopBackOff (last StartError 128) r1");
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn failed_container_creation_is_retried() {
        let sim = SimulatedRuntime::new().script("a", &[StartFails("CreateContainerError", "no room"), ExitsOnStop(0, 0)]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        pod.advance_to(1).await;
        assert_eq!(pod.summary("a"), "waiting CreateContainerError");
        pod.advance_to(11).await;
        assert_eq!(pod.summary("a"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start a#0", "10 start a#0"]);
        pod.stop(1);
        pod.finished().await;
        assert!(pod.events("a").contains(&"Failed: Error: no room".to_owned()));
    }
}

lifecycle_test! {
    async fn active_deadline_fails_the_pod() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({"activeDeadlineSeconds": 5, "containers": [{"name": "a"}]}));
        pod.advance_to(4).await;
        assert_eq!(pod.summary("a"), "running ready");
        let state = pod.finished().await;
        assert_eq!(sim.now(), 5);
        let failure = state.failure.expect("a failure");
        assert_eq!(failure.cause, FailureCause::DeadlineExceeded);
        assert_eq!(failure.message, "Pod was active on the node longer than the specified deadline");
    }
}

lifecycle_test! {
    async fn failed_pod_setup_is_retried() {
        let sim = SimulatedRuntime::new();
        sim.setup_failures.borrow_mut().extend([("FailedCreatePodSandBox", "no network"), ("FailedMount", "no volume")]);
        let pod = TestPod::new(&sim, json!({"containers": [{"name": "a"}]}));
        let state = pod.advance_to(0).await;
        assert!(!state.sandbox_ready);
        assert_eq!(pod.summary("a"), "waiting ContainerCreating");
        let state = pod.advance_to(5).await;
        assert_eq!(sim.log_of(&["set up", "start"]), ["0 set up", "1 set up", "3 set up", "3 start a#0"]);
        let events: Vec<_> = state.events.iter().take(2).map(|e| (e.reason.as_str(), e.message.as_str())).collect();
        assert_eq!(events, [
            ("FailedCreatePodSandBox", "no network"),
            ("FailedMount", "no volume"),
        ]);
        pod.stop(1);
        pod.finished().await;
    }
}

lifecycle_test! {
    async fn pod_without_containers_finishes_at_once() {
        let sim = SimulatedRuntime::new();
        let pod = TestPod::new(&sim, json!({}));
        pod.finished().await;
    }
}
