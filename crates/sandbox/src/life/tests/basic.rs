//! Start, restart and stop.

use serde_json::json;

use crate::life::sim::{Script, Sim, World};
use Script::{Ends, Fails, Obeys, OutOfMemory, Stubborn};

life! {
    async fn container_runs_and_is_stopped() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        let state = world.at(1).await;
        assert!(state.sandbox_ready);
        assert_eq!(state.pod_ips, ["10.0.0.7"]);
        assert_eq!(state.observed_generation, Some(1));
        assert_eq!(world.word("a"), "running ready");
        let status = world.status("a");
        assert_eq!(status.container_id, Some(format!("coracle://{:064x}", 1)));
        assert_eq!(status.image, "docker.io/library/image:1");
        assert_eq!(status.image_id, "docker.io/library/image:1@sha256:00");
        assert_eq!(status.started, Some(true));
        world.stop(30);
        let state = world.finish().await;
        assert!(!state.sandbox_ready);
        assert_eq!(world.word("a"), "ended Error 143");
        assert_eq!(sim.log(), ["0 up", "0 pull image:1", "0 start a#0", "1 signal a 15", "1 exit a 143", "1 down"]);
        assert_eq!(world.events("a"), [
            "Pulling: Pulling image \"image:1\"",
            "Pulled: Successfully pulled image \"image:1\" in 0s (0s including waiting). Image size: 42 bytes.",
            "Created: Container created",
            "Started: Container started",
            "Killing: Stopping container a",
        ]);
    }
}

life! {
    async fn abandoned_pod_is_left_for_the_next_sandbox() {
        let sim = Sim::new().script("a", &[Obeys(3, 0)]);
        let spec = json!({"containers": [{"name": "a"}], "terminationGracePeriodSeconds": 9});
        let world = World::new(&sim, spec);
        world.at(1).await;
        let (abandoned, state) = tokio::join!(world.abandon(), world.at(2));
        assert!(abandoned);
        // A container that is being killed must not get traffic, so it is not ready.
        assert!(!state.sandbox_ready && !state.containers[0].ready);
        assert!(state.containers[0].state.as_ref().is_some_and(|state| state.running.is_some()));
        assert!(!world.state().finished);
        // The kill does not count as an exit of the container.
        assert_eq!(world.word("a"), "running");
        assert_eq!(sim.log_of(&["signal", "exit", "start", "down"]), ["0 start a#0", "1 signal a 15", "4 exit a 0"]);
    }
}

life! {
    async fn abandoned_pod_keeps_running_status_of_killed_containers() {
        let sim = Sim::new().script("a", &[Obeys(3, 0)]).script("b", &[Stubborn]).script("done", &[Ends(1, 0)]);
        let names = ["a", "b", "done"].map(|name| json!({"name": name}));
        let spec = json!({"containers": names, "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 9});
        let world = World::new(&sim, spec);
        world.at(2).await;
        let running = ["a", "b"].map(|name| world.status(name).state);
        assert!(world.abandon().await);
        assert_eq!(sim.log_of(&["exit"]), ["1 exit done 0", "5 exit a 0", "11 exit b 137"]);
        assert_eq!(world.word("done"), "ended Completed 0");
        for (name, before) in ["a", "b"].into_iter().zip(running) {
            assert_eq!(world.word(name), "running");
            assert_eq!(world.status(name).state, before);
        }
    }
}

life! {
    async fn ending_pod_is_not_abandoned() {
        for stop_first in [true, false] {
            let sim = Sim::new().script("a", &[Obeys(3, 0)]);
            let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
            world.at(1).await;
            let stop = async {
                world.stop(5);
            };
            let abandoned = match stop_first {
                true => {
                    stop.await;
                    world.abandon().await
                }
                false => tokio::join!(world.abandon(), stop).0,
            };
            assert!(!abandoned && world.state().finished);
            assert_eq!(world.word("a"), "ended Completed 0");
            assert_eq!(sim.log_of(&["down"]).len(), 1);
        }
    }
}

life! {
    async fn container_that_ignores_sigterm_is_killed() {
        let sim = Sim::new().script("a", &[Stubborn]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        world.stop(5);
        world.finish().await;
        assert_eq!(sim.log_of(&["signal", "exit"]), ["1 signal a 15", "6 signal a 9", "6 exit a 137"]);
    }
}

life! {
    async fn later_stop_only_shortens_the_grace_period() {
        let sim = Sim::new().script("a", &[Stubborn]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        world.stop(60);
        world.at(10).await;
        world.stop(100);
        world.at(20).await;
        world.stop(3);
        world.finish().await;
        assert_eq!(sim.log_of(&["signal"]), ["1 signal a 15", "23 signal a 9"]);
    }
}

life! {
    async fn grace_period_is_at_least_two_seconds() {
        let sim = Sim::new().script("a", &[Stubborn]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        world.stop(0);
        world.finish().await;
        assert_eq!(sim.log_of(&["signal"]), ["1 signal a 15", "3 signal a 9"]);
    }
}

life! {
    async fn restart_delay_grows_with_each_crash() {
        let sim = Sim::new().script("a", &[Ends(1, 3)]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        // The container exits at 1, restarts at once, exits at 2, waits 10 s, exits at 13, waits 20 s, …
        world.at(3).await;
        assert_eq!(world.word("a"), "ended Error 3 (last Error 3) r1");
        world.at(5).await;
        assert_eq!(world.word("a"), "waiting CrashLoopBackOff (last Error 3) r1");
        let waiting = world.status("a").state.and_then(|state| state.waiting).expect("it waits");
        assert_eq!(
            waiting.message.as_deref(),
            Some("back-off 10s restarting failed container=a pod=p_ns(u)")
        );
        world.at(800).await;
        let starts: Vec<_> = sim.log_of(&["start"]);
        assert_eq!(starts, [
            "0 start a#0", "1 start a#1", "12 start a#2", "33 start a#3", "74 start a#4",
            "155 start a#5", "316 start a#6", "617 start a#7",
        ]);
        assert!(world.events("a").contains(
            &"BackOff: Back-off restarting failed container a in pod p_ns(u)".to_owned()
        ));
        world.stop(1);
        world.finish().await;
        assert_eq!(world.word("a"), "ended Error 3 (last Error 3) r7");
    }
}

life! {
    async fn ten_minutes_of_running_reset_the_back_off() {
        let sim = Sim::new().script("a", &[Ends(1, 1), Ends(1, 1), Ends(601, 1), Ends(5, 1), Obeys(0, 0)]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(700).await;
        assert_eq!(sim.log_of(&["start"]), [
            "0 start a#0", "1 start a#1", "12 start a#2", "613 start a#3", "628 start a#4",
        ]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn restarts_follow_the_restart_policy() {
        for (policy, script, want) in [
            ("Never", Ends(1, 0), "ended Completed 0"),
            ("Never", Ends(1, 2), "ended Error 2"),
            ("Never", OutOfMemory, "ended OOMKilled 137"),
            ("OnFailure", Ends(1, 0), "ended Completed 0"),
        ] {
            let sim = Sim::new().script("a", &[script]);
            let world = World::new(&sim, json!({"restartPolicy": policy, "containers": [{"name": "a"}]}));
            let state = world.finish().await;
            assert_eq!(world.word("a"), want);
            assert_eq!(state.failure, None);
        }
        let sim = Sim::new().script("a", &[Ends(1, 2), Ends(1, 0)]);
        let world = World::new(&sim, json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}]}));
        world.finish().await;
        assert_eq!(world.word("a"), "ended Completed 0 (last Error 2) r1");
        let end = world.status("a").last_state.and_then(|state| state.terminated).expect("an end");
        assert_eq!(end.message.as_deref(), Some("last words of a"));
    }
}

life! {
    async fn pod_continues_while_one_container_runs() {
        let sim = Sim::new().script("a", &[Ends(1, 0)]);
        let world = World::new(&sim, json!({"restartPolicy": "Never", "containers": [{"name": "a"}, {"name": "b"}]}));
        let state = world.at(5).await;
        assert!(!state.finished);
        assert_eq!(world.word("a"), "ended Completed 0");
        assert_eq!(world.word("b"), "running ready");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn init_containers_run_one_after_the_other() {
        let sim = Sim::new().script("i", &[Ends(2, 0)]).script("j", &[Ends(3, 1), Ends(3, 0)]);
        let world = World::new(&sim, json!({
            "initContainers": [{"name": "i"}, {"name": "j"}],
            "containers": [{"name": "a"}],
        }));
        world.at(1).await;
        assert_eq!(world.word("i"), "running");
        assert_eq!(world.word("j"), "waiting PodInitializing");
        assert_eq!(world.word("a"), "waiting PodInitializing");
        world.at(10).await;
        assert_eq!(world.word("i"), "ended Completed 0 ready");
        assert_eq!(world.word("j"), "ended Completed 0 (last Error 1) r1 ready");
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#0", "2 start j#0", "5 start j#1", "8 start a#0"]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failed_init_container_ends_never_restarted_pod() {
        let sim = Sim::new().script("i", &[Ends(2, 1)]);
        let world = World::new(&sim, json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        world.finish().await;
        assert_eq!(world.word("i"), "ended Error 1");
        assert_eq!(world.word("a"), "waiting PodInitializing");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#0"]);
    }
}

life! {
    async fn stopping_ends_an_init_container() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({
            "initContainers": [{"name": "i"}],
            "containers": [{"name": "a"}],
        }));
        world.at(1).await;
        world.stop(5);
        world.finish().await;
        assert_eq!(world.word("i"), "ended Error 143");
        assert_eq!(sim.log_of(&["start"]), ["0 start i#0"]);
    }
}

life! {
    async fn failed_program_start_counts_as_a_run() {
        let sim = Sim::new().script("a", &[Fails("StartError", "no such file")]);
        let world = World::new(&sim, json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        world.finish().await;
        assert_eq!(world.word("a"), "ended StartError 128");
        // The status shows that a container was created.
        let status = world.status("a");
        let end = status.state.unwrap().terminated.unwrap();
        assert!(status.container_id.is_some());
        assert_eq!(end.container_id, status.container_id);
        let sim = Sim::new().script("a", &[Fails("RunContainerError", "no such file")]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(6).await;
        assert_eq!(world.word("a"), "waiting CrashLoopBackOff (last StartError 128) r1");
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn failed_container_creation_is_retried() {
        let sim = Sim::new().script("a", &[Fails("CreateContainerError", "no room"), Obeys(0, 0)]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        world.at(1).await;
        assert_eq!(world.word("a"), "waiting CreateContainerError");
        world.at(11).await;
        assert_eq!(world.word("a"), "running ready");
        assert_eq!(sim.log_of(&["start"]), ["0 start a#0", "10 start a#0"]);
        world.stop(1);
        world.finish().await;
        assert!(world.events("a").contains(&"Failed: Error: no room".to_owned()));
    }
}

life! {
    async fn active_deadline_fails_the_pod() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({"activeDeadlineSeconds": 5, "containers": [{"name": "a"}]}));
        world.at(4).await;
        assert_eq!(world.word("a"), "running ready");
        let state = world.finish().await;
        assert_eq!(sim.now(), 5);
        let failure = state.failure.expect("it failed");
        assert_eq!(failure.reason, "DeadlineExceeded");
        assert_eq!(failure.message, "Pod was active on the node longer than the specified deadline");
    }
}

life! {
    async fn failed_pod_setup_is_retried() {
        let sim = Sim::new();
        sim.ups.borrow_mut().extend([("", "no network"), ("FailedMount", "no volume")]);
        let world = World::new(&sim, json!({"containers": [{"name": "a"}]}));
        let state = world.at(0).await;
        assert!(!state.sandbox_ready);
        assert_eq!(world.word("a"), "waiting ContainerCreating");
        let state = world.at(5).await;
        assert_eq!(sim.log_of(&["up", "start"]), ["0 up", "1 up", "3 up", "3 start a#0"]);
        let events: Vec<_> = state.events.iter().take(2).map(|e| (e.reason.as_str(), e.message.as_str())).collect();
        assert_eq!(events, [
            ("FailedCreatePodSandBox", "Failed to create pod sandbox: no network"),
            ("FailedMount", "no volume"),
        ]);
        world.stop(1);
        world.finish().await;
    }
}

life! {
    async fn pod_without_containers_finishes_at_once() {
        let sim = Sim::new();
        let world = World::new(&sim, json!({}));
        world.finish().await;
    }
}
