//! Statuses for given pods and sandbox states.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, PodStatus};
use k8s_openapi::jiff::Timestamp;
use pod_protocol::{FailureCause, HostFacts, PodFailure, PodState, Problem};
use serde_json::{Value, json};

use super::*;

const NOW: &str = "2026-01-01T00:01:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "u", "generation": 2 },
        "spec": spec,
        "status": { "phase": "Pending", "qosClass": "BestEffort" },
    }))
    .unwrap()
}

fn one_container(policy: &str) -> Pod {
    pod(json!({ "restartPolicy": policy, "containers": [{ "name": "a", "image": "i" }] }))
}

fn container(name: &str, state: Value) -> ContainerStatus {
    let running = state.get("running").is_some();
    let mut status = json!({
        "name": name, "image": "i", "imageID": "sha256:1", "restartCount": 0,
        "ready": running, "started": running, "state": state,
    });
    if has_run(&status["state"]) {
        status["containerID"] = json!(format!("coracle://{name}0"));
    }
    serde_json::from_value(status).unwrap()
}

fn has_run(state: &Value) -> bool {
    state.get("waiting").is_none()
}

fn running(name: &str) -> ContainerStatus {
    let state = json!({ "running": { "startedAt": "2026-01-01T00:00:10Z" } });
    container(name, state)
}

fn terminated(name: &str, code: i32) -> ContainerStatus {
    let reason = if code == 0 { "Completed" } else { "Error" };
    let state = json!({ "terminated": {
        "exitCode": code, "reason": reason, "containerID": format!("coracle://{name}0"),
        "startedAt": "2026-01-01T00:00:10Z", "finishedAt": "2026-01-01T00:00:20Z",
    } });
    let mut status = container(name, state);
    status.ready = false;
    status
}

/// An init container that has succeeded. The sandbox reports it as ready.
fn completed(name: &str) -> ContainerStatus {
    let mut status = terminated(name, 0);
    status.ready = true;
    status
}

fn waiting(name: &str, reason: &str) -> ContainerStatus {
    container(name, json!({ "waiting": { "reason": reason } }))
}

fn crashed(name: &str, restarts: i32) -> ContainerStatus {
    let mut status = waiting(name, "CrashLoopBackOff");
    status.last_state = terminated(name, 1).state;
    status.container_id = Some(format!("coracle://{name}0"));
    status.restart_count = restarts;
    status
}

#[test]
fn checkpoint_never_replaces_newer_status() {
    let applied = |known: ContainerStatus, saved: ContainerStatus| {
        let mut statuses = vec![known];
        apply_checkpoint(&mut statuses, &[saved]);
        statuses.remove(0)
    };
    let restarted = |mut status: ContainerStatus| {
        status.restart_count = 1;
        status
    };
    assert_eq!(
        applied(running("a"), terminated("a", 3)),
        terminated("a", 3)
    );
    assert_eq!(
        applied(waiting("a", "ContainerCreating"), running("a")),
        running("a")
    );
    assert_eq!(
        applied(running("a"), restarted(terminated("a", 3))),
        restarted(terminated("a", 3))
    );
    assert_eq!(
        applied(restarted(running("a")), terminated("a", 3)),
        restarted(running("a"))
    );
    assert_eq!(
        applied(terminated("a", 3), running("a")),
        terminated("a", 3)
    );
    assert_eq!(
        applied(running("a"), waiting("a", "ContainerCreating")),
        running("a")
    );
}

fn state(containers: Vec<ContainerStatus>) -> PodState {
    PodState {
        sandbox_ready: true,
        pod_ips: vec!["100.64.0.5".to_owned()],
        containers,
        ..Default::default()
    }
}

fn with_init(init: Vec<ContainerStatus>, containers: Vec<ContainerStatus>) -> PodState {
    PodState {
        init_containers: init,
        ..state(containers)
    }
}

fn finished(state: PodState) -> PodState {
    PodState {
        finished: true,
        ..state
    }
}

fn generated(pod: &Pod, state: Option<&PodState>, previous: &PodStatus) -> PodStatus {
    let state = state.cloned().map(|state| PodState {
        host: HostFacts {
            host_ips: vec!["10.0.0.1".parse().unwrap()],
            started_at: Some(now()),
            ..HostFacts::default()
        },
        ..state
    });
    let inputs = StatusInputs {
        pod,
        state: state.as_ref(),
        previous,
        terminating: false,
        pending_resize: None,
    };
    pod_status(&inputs, now())
}

fn status(pod: &Pod, state: &PodState) -> PodStatus {
    generated(pod, Some(state), &PodStatus::default())
}

/// Phase, reason and message, and the conditions, one per line.
fn summary(status: &PodStatus) -> String {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut lines = vec![
        [&status.phase, &status.reason, &status.message]
            .map(text)
            .join(" ")
            .trim()
            .to_owned(),
    ];
    for c in status.conditions.iter().flatten() {
        let why = format!("{} {}", text(&c.reason), text(&c.message));
        lines.push(
            format!("{}={} {}", c.type_, c.status, why.trim())
                .trim()
                .to_owned(),
        );
    }
    lines.join("\n")
}

#[test]
fn pod_without_sandbox_state() {
    insta::assert_json_snapshot!(generated(
        &one_container("Always"),
        None,
        &PodStatus::default()
    ));
}

#[test]
fn running_pod() {
    let pod = pod(json!({ "containers": [{
        "name": "a", "image": "i",
        "resources": { "requests": { "cpu": "1" } },
        "volumeMounts": [
            { "name": "v", "mountPath": "/v" },
            { "name": "w", "mountPath": "/w", "readOnly": true, "recursiveReadOnly": "IfPossible" },
        ],
    }] }));
    insta::assert_json_snapshot!(status(&pod, &state(vec![running("a")])));
}

/// An init container, or a sidecar that has not started yet.
fn unready(name: &str) -> ContainerStatus {
    let mut status = running(name);
    (status.ready, status.started) = (false, Some(false));
    status
}

/// The snapshot is a list of cases with their phase and conditions.
#[test]
fn phases_and_conditions() {
    let creating = |name| waiting(name, "ContainerCreating");
    let initializing = |name| waiting(name, "PodInitializing");
    let two = |policy: &str| {
        pod(json!({ "restartPolicy": policy, "containers": [{ "name": "a" }, { "name": "b" }] }))
    };
    let init = |policy: &str| {
        pod(json!({
            "restartPolicy": policy,
            "initContainers": [{ "name": "i" }, { "name": "j" }],
            "containers": [{ "name": "a" }],
        }))
    };
    let sidecar = pod(json!({
        "restartPolicy": "Never",
        "initContainers": [{ "name": "s", "restartPolicy": "Always" }],
        "containers": [{ "name": "a" }],
    }));
    let own_policy = pod(json!({
        "restartPolicy": "Never",
        "containers": [{ "name": "a", "restartPolicy": "OnFailure" }, { "name": "b" }],
    }));
    let mut gated = pod(json!({
        "containers": [{ "name": "a" }],
        "readinessGates": [{ "conditionType": "example.com/one" }, { "conditionType": "example.com/two" }],
    }));
    gated.status = serde_json::from_value(json!({ "conditions": [
        { "type": "example.com/one", "status": "False" }, { "type": "other", "status": "True" },
    ] }))
    .unwrap();
    let failed = |cause: FailureCause, state: PodState| PodState {
        failure: Some(PodFailure::new(cause, "why")),
        ..state
    };
    let no_sandbox = |state: PodState| PodState {
        sandbox_ready: false,
        ..state
    };

    let cases = [
        (
            "no sandbox yet",
            one_container("Always"),
            no_sandbox(state(vec![creating("a")])),
        ),
        (
            "image is missing",
            one_container("Never"),
            state(vec![waiting("a", "ErrImagePull")]),
        ),
        (
            "one container is not ready",
            two("Always"),
            state(vec![running("a"), unready("b")]),
        ),
        (
            "one container was not started",
            two("Always"),
            state(vec![running("a"), creating("b")]),
        ),
        (
            "one container is unknown",
            two("Always"),
            state(vec![running("a")]),
        ),
        (
            "one of two containers has terminated",
            two("Never"),
            state(vec![running("a"), terminated("b", 1)]),
        ),
        (
            "all containers have terminated, sandbox has not finished",
            two("Never"),
            state(vec![terminated("a", 0), terminated("b", 0)]),
        ),
        (
            "Never: success",
            two("Never"),
            finished(state(vec![terminated("a", 0), terminated("b", 0)])),
        ),
        (
            "Never: failure",
            two("Never"),
            finished(state(vec![terminated("a", 0), terminated("b", 3)])),
        ),
        (
            "OnFailure: success",
            one_container("OnFailure"),
            finished(state(vec![terminated("a", 0)])),
        ),
        (
            "OnFailure: failure",
            one_container("OnFailure"),
            state(vec![terminated("a", 1)]),
        ),
        (
            "OnFailure: backing off",
            one_container("OnFailure"),
            state(vec![crashed("a", 2)]),
        ),
        (
            "Always: success",
            one_container("Always"),
            state(vec![terminated("a", 0)]),
        ),
        (
            "Always: backing off",
            one_container("Always"),
            state(vec![crashed("a", 2)]),
        ),
        (
            "deleted: success",
            one_container("Always"),
            finished(state(vec![terminated("a", 0)])),
        ),
        (
            "deleted: killed",
            one_container("Always"),
            finished(state(vec![terminated("a", 137)])),
        ),
        (
            "deleted before it started",
            one_container("Always"),
            finished(state(vec![creating("a")])),
        ),
        (
            "own policy restarts",
            own_policy.clone(),
            state(vec![terminated("a", 1), terminated("b", 0)]),
        ),
        (
            "own policy does not restart",
            own_policy,
            finished(state(vec![terminated("a", 0), terminated("b", 0)])),
        ),
        (
            "first init container",
            init("Never"),
            with_init(
                vec![unready("i"), initializing("j")],
                vec![initializing("a")],
            ),
        ),
        (
            "second init container",
            init("Never"),
            with_init(vec![completed("i"), unready("j")], vec![initializing("a")]),
        ),
        (
            "initialized",
            init("Never"),
            with_init(vec![completed("i"), completed("j")], vec![running("a")]),
        ),
        (
            "init fails: Never",
            init("Never"),
            finished(with_init(
                vec![completed("i"), terminated("j", 1)],
                vec![initializing("a")],
            )),
        ),
        (
            "init fails: Always",
            init("Always"),
            with_init(
                vec![crashed("i", 1), initializing("j")],
                vec![initializing("a")],
            ),
        ),
        (
            "sidecar starts",
            sidecar.clone(),
            with_init(vec![unready("s")], vec![initializing("a")]),
        ),
        (
            "sidecar runs",
            sidecar.clone(),
            with_init(vec![running("s")], vec![running("a")]),
        ),
        (
            "sidecar restarts",
            sidecar.clone(),
            with_init(vec![crashed("s", 1)], vec![running("a")]),
        ),
        (
            "sidecar runs longer than the container",
            sidecar.clone(),
            with_init(vec![running("s")], vec![terminated("a", 0)]),
        ),
        (
            "sidecar has terminated",
            sidecar,
            finished(with_init(
                vec![terminated("s", 143)],
                vec![terminated("a", 0)],
            )),
        ),
        (
            "readiness gates are not ready",
            gated,
            state(vec![running("a")]),
        ),
        (
            "deadline exceeded, still running",
            one_container("Never"),
            failed(FailureCause::DeadlineExceeded, state(vec![running("a")])),
        ),
        (
            "deadline exceeded, finished",
            one_container("Never"),
            finished(failed(
                FailureCause::DeadlineExceeded,
                state(vec![terminated("a", 0)]),
            )),
        ),
        (
            "node shut down",
            one_container("Always"),
            finished(failed(
                FailureCause::NodeShutdown,
                state(vec![terminated("a", 0)]),
            )),
        ),
    ];
    let results: Vec<_> = cases
        .iter()
        .map(|(name, pod, state)| format!("# {name}\n{}\n", summary(&status(pod, state))))
        .collect();
    insta::assert_snapshot!(results.join("\n"));
}

#[test]
fn status_never_goes_back() {
    let pod = one_container("Always");
    let mut third = crashed("a", 3);
    third.image_id = "sha256:1".to_owned();
    let before = status(&pod, &state(vec![third.clone()]));
    // A new sandbox that does not know the earlier runs.
    let after = generated(&pod, Some(&state(vec![running("a")])), &before);
    let a = &after.container_statuses.as_ref().unwrap()[0];
    assert_eq!(a.restart_count, 3);
    assert_eq!(a.last_state, third.last_state);

    // A container that has terminated for good does not run again.
    let never = one_container("Never");
    let before = status(&never, &state(vec![terminated("a", 0)]));
    let after = generated(&never, Some(&state(vec![running("a")])), &before);
    assert_eq!(after.container_statuses, before.container_statuses);

    // A terminal phase stays.
    let failed = status(&never, &finished(state(vec![terminated("a", 1)])));
    let after = generated(&never, Some(&state(vec![running("a")])), &failed);
    assert_eq!(after.phase.as_deref(), Some("Failed"));

    // After a restart the previous run is the last state.
    let before = status(&pod, &state(vec![terminated("a", 1)]));
    let mut again = running("a");
    again.container_id = Some("coracle://a1".to_owned());
    again.restart_count = 1;
    let after = generated(&pod, Some(&state(vec![again])), &before);
    let a = &after.container_statuses.unwrap()[0];
    assert_eq!(a.last_state, terminated("a", 1).state);
}

#[test]
fn transition_times_change_only_with_status() {
    let pod = one_container("Always");
    let first = status(&pod, &state(vec![running("a")]));
    let state = state(vec![unready("a")]);
    let inputs = StatusInputs {
        pod: &pod,
        state: Some(&state),
        previous: &first,
        terminating: false,
        pending_resize: None,
    };
    let later: Timestamp = "2026-01-01T00:02:00Z".parse().unwrap();
    let second = pod_status(&inputs, later);
    assert_eq!(second.start_time, first.start_time);
    let since: Vec<_> = second
        .conditions
        .unwrap()
        .into_iter()
        .map(|c| (c.type_, c.last_transition_time.unwrap().0 == later))
        .collect();
    let expected = [
        ("PodReadyToStartContainers", false),
        ("Initialized", false),
        ("Ready", true),
        ("ContainersReady", true),
        ("PodScheduled", false),
    ];
    assert_eq!(since, expected.map(|(type_, new)| (type_.to_owned(), new)));
}

#[test]
fn termination_messages_are_truncated_to_equal_shares() {
    let containers: Vec<_> = ["a", "b", "c", "d"]
        .map(|name| json!({ "name": name, "image": "i" }))
        .into();
    let pod = pod(json!({ "restartPolicy": "Never", "containers": containers }));
    let mut with_message = terminated("a", 1);
    let end = |status: &mut ContainerStatus| status.state.as_mut().unwrap().terminated.take();
    let mut termination = end(&mut with_message).unwrap();
    termination.message = Some("ä".repeat(2048));
    with_message.last_state = Some(ContainerState {
        terminated: Some(termination.clone()),
        ..Default::default()
    });
    with_message.state.clone_from(&with_message.last_state);
    let status = status(
        &pod,
        &state(vec![with_message, running("b"), running("c"), running("d")]),
    );
    let status = &status.container_statuses.unwrap()[0];
    for state in [&status.state, &status.last_state] {
        let end = state.as_ref().unwrap().terminated.as_ref().unwrap();
        assert_eq!(end.message.as_ref().unwrap().len(), 12 * 1024 / 4);
    }
}

#[test]
fn reason_stays_with_terminal_phase() {
    let pod = one_container("Never");
    let failed = PodState {
        failure: Some(PodFailure::new(FailureCause::DeadlineExceeded, "why")),
        ..finished(state(vec![terminated("a", 137)]))
    };
    let first = status(&pod, &failed);
    let second = generated(&pod, Some(&failed), &first);
    assert_eq!(second.reason.as_deref(), Some("DeadlineExceeded"));
    assert_eq!(summary(&second), summary(&first));
}

#[test]
fn pod_with_host_network_has_host_address() {
    let pod = pod(json!({ "hostNetwork": true, "containers": [{ "name": "a" }] }));
    let status = status(&pod, &PodState::default());
    assert_eq!(status.pod_ip.as_deref(), Some("10.0.0.1"));
}

#[test]
fn lost_sandbox_terminates_running_containers() {
    let restarts = |policy: &str, state: PodState| {
        let pod = pod(
            json!({ "restartPolicy": policy, "containers": [{ "name": "a" }, { "name": "b" }] }),
        );
        restarts_after_loss(&pod, &status(&pod, &state))
    };
    assert!(restarts("Always", state(vec![running("a"), running("b")])));
    assert!(restarts(
        "OnFailure",
        state(vec![running("a"), terminated("b", 0)])
    ));
    assert!(!restarts(
        "Never",
        state(vec![running("a"), terminated("b", 0)])
    ));
    // Containers that never ran can still run.
    assert!(restarts(
        "Never",
        state(vec![
            waiting("a", "ErrImagePull"),
            waiting("b", "ContainerCreating")
        ])
    ));

    let pod = one_container("Never");
    let before = status(&pod, &state(vec![running("a")]));
    let inputs = StatusInputs {
        pod: &pod,
        state: None,
        previous: &before,
        terminating: false,
        pending_resize: None,
    };
    insta::assert_json_snapshot!(terminal_status(&inputs, None, now()));
}

#[test]
fn lost_uninitialized_pod_has_no_terminated_containers() {
    let pod = pod(json!({ "initContainers": [{ "name": "i" }], "containers": [{ "name": "a" }] }));
    let before = status(
        &pod,
        &with_init(vec![unready("i")], vec![waiting("a", "PodInitializing")]),
    );
    let inputs = StatusInputs {
        pod: &pod,
        state: None,
        previous: &before,
        terminating: true,
        pending_resize: None,
    };
    let status = terminal_status(&inputs, None, now());
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert!(
        status.container_statuses.unwrap()[0]
            .state
            .as_ref()
            .unwrap()
            .waiting
            .is_some()
    );
    let init = &status.init_container_statuses.unwrap()[0];
    let end = init.state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!(end.exit_code, 137);
    assert_eq!(end.reason.as_deref(), Some("ContainerStatusUnknown"));
}

#[test]
fn patch_replaces_addresses_and_reasons_and_has_uid() {
    let status = PodStatus {
        conditions: Some(vec![PodCondition {
            type_: "Ready".to_owned(),
            status: "True".to_owned(),
            ..Default::default()
        }]),
        pod_ips: Some(vec![PodIP {
            ip: "100.64.0.5".to_owned(),
        }]),
        ..Default::default()
    };
    assert_eq!(
        status_patch("u", &status),
        json!({
            "metadata": { "uid": "u" },
            "status": {
                "conditions": [
                    { "type": "Ready", "status": "True", "reason": null, "message": null },
                    { "$patch": "delete", "type": "PodResizePending" },
                    { "$patch": "delete", "type": "PodResizeInProgress" },
                ],
                "podIPs": [{ "$patch": "replace" }, { "ip": "100.64.0.5" }],
            },
        })
    );
}

#[test]
fn rejected_pod_has_reason() {
    let problem = Problem::new("OutOfpods", "full");
    let status = rejected_status(&one_container("Always"), &problem, now());
    assert_eq!(summary(&status), "Failed OutOfpods Pod was rejected: full");
}

#[test]
fn resize_condition_stays_until_resize_is_done() {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"uid": "u", "generation": 2},
        "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "2"}}}]},
    }))
    .unwrap();
    let resize_conditions = |cpu: &str, resize: Option<&Problem>| {
        let state = PodState {
            containers: serde_json::from_value(json!([{
                "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {}}, "resources": {"requests": {"cpu": cpu}},
            }]))
            .unwrap(),
            ..Default::default()
        };
        let inputs = StatusInputs {
            pod: &pod,
            state: Some(&state),
            previous: &PodStatus::default(),
            terminating: false,
            pending_resize: resize,
        };
        let status = pod_status(&inputs, Timestamp::UNIX_EPOCH);
        let conditions = status.conditions.unwrap().into_iter();
        let resizes = conditions.filter(|condition| condition.type_.starts_with("PodResize"));
        resizes
            .map(|condition| format!("{} {:?}", condition.type_, condition.reason))
            .collect::<Vec<_>>()
    };
    assert_eq!(resize_conditions("2", None), Vec::<String>::new());
    assert_eq!(resize_conditions("1", None), ["PodResizeInProgress None"]);
    let problem = Problem::new("Deferred", "in use");
    assert_eq!(
        resize_conditions("1", Some(&problem)),
        ["PodResizePending Some(\"Deferred\")"]
    );
}

#[test]
fn restart_of_all_containers_is_no_failure() {
    let pod = pod(json!({
        "restartPolicy": "Never",
        "initContainers": [{ "name": "s", "image": "i", "restartPolicy": "Always", "restartPolicyRules": [
            { "action": "RestartAllContainers", "exitCodes": { "operator": "In", "values": [42] } },
        ] }],
        "containers": [{ "name": "a", "image": "i" }],
    }));
    let again = |name: &str, code| {
        let mut status = waiting(name, "RestartingAllContainers");
        status.last_state = terminated(name, code).state;
        status
    };
    let states = [
        with_init(vec![running("s")], vec![running("a")]),
        // The sidecar's exit triggers the restart; the container was killed.
        with_init(vec![terminated("s", 42)], vec![terminated("a", 143)]),
        with_init(vec![again("s", 42)], vec![again("a", 143)]),
        with_init(vec![running("s")], vec![again("a", 143)]),
        with_init(vec![running("s")], vec![running("a")]),
        // No rule matches: the pod ends with the container.
        finished(with_init(
            vec![terminated("s", 0)],
            vec![terminated("a", 143)],
        )),
    ];
    let summaries: Vec<_> = states
        .iter()
        .map(|state| summary(&status(&pod, state)))
        .collect();
    insta::assert_snapshot!(summaries.join("\n---\n"));
}
