//! Cases that are named for what happens to a pod; snapshots show what the API server is told.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, PodStatus};
use k8s_openapi::jiff::Timestamp;
use pod_protocol::{PodState, Problem};
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

fn one(policy: &str) -> Pod {
    pod(json!({ "restartPolicy": policy, "containers": [{ "name": "a", "image": "i" }] }))
}

fn container(name: &str, state: Value) -> ContainerStatus {
    let running = state.get("running").is_some();
    let mut status = json!({
        "name": name, "image": "i", "imageID": "sha256:1", "restartCount": 0,
        "ready": running, "started": running, "state": state,
    });
    if state_has_run(&status["state"]) {
        status["containerID"] = json!(format!("coracle://{name}0"));
    }
    serde_json::from_value(status).unwrap()
}

fn state_has_run(state: &Value) -> bool {
    state.get("waiting").is_none()
}

fn running(name: &str) -> ContainerStatus {
    let state = json!({ "running": { "startedAt": "2026-01-01T00:00:10Z" } });
    container(name, state)
}

fn ended(name: &str, code: i32) -> ContainerStatus {
    let reason = if code == 0 { "Completed" } else { "Error" };
    let state = json!({ "terminated": {
        "exitCode": code, "reason": reason, "containerID": format!("coracle://{name}0"),
        "startedAt": "2026-01-01T00:00:10Z", "finishedAt": "2026-01-01T00:00:20Z",
    } });
    let mut status = container(name, state);
    status.ready = false;
    status
}

/// An init container that has succeeded is ready, as the sandbox says.
fn done(name: &str) -> ContainerStatus {
    let mut status = ended(name, 0);
    status.ready = true;
    status
}

fn waiting(name: &str, reason: &str) -> ContainerStatus {
    container(name, json!({ "waiting": { "reason": reason } }))
}

fn crashed(name: &str, restarts: i32) -> ContainerStatus {
    let mut status = waiting(name, "CrashLoopBackOff");
    status.last_state = ended(name, 1).state;
    status.container_id = Some(format!("coracle://{name}0"));
    status.restart_count = restarts;
    status
}

#[test]
fn a_checkpoint_never_takes_a_status_back() {
    let recalled = |known: ContainerStatus, left: ContainerStatus| {
        let mut statuses = vec![known];
        recall(&mut statuses, &[left]);
        statuses.remove(0)
    };
    let again = |mut status: ContainerStatus| {
        status.restart_count = 1;
        status
    };
    assert_eq!(recalled(running("a"), ended("a", 3)), ended("a", 3));
    assert_eq!(
        recalled(waiting("a", "ContainerCreating"), running("a")),
        running("a")
    );
    assert_eq!(
        recalled(running("a"), again(ended("a", 3))),
        again(ended("a", 3))
    );
    assert_eq!(
        recalled(again(running("a")), ended("a", 3)),
        again(running("a"))
    );
    assert_eq!(recalled(ended("a", 3), running("a")), ended("a", 3));
    assert_eq!(
        recalled(running("a"), waiting("a", "ContainerCreating")),
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

fn concluded(pod: &Pod, state: Option<&PodState>, previous: &PodStatus) -> PodStatus {
    let host_ips = ["10.0.0.1".parse().unwrap()];
    let known = Known {
        pod,
        state,
        previous,
        ending: false,
        host_ips: &host_ips,
        resize: None,
    };
    pod_status(&known, now())
}

fn status(pod: &Pod, state: &PodState) -> PodStatus {
    concluded(pod, Some(state), &PodStatus::default())
}

/// Phase, why, and the conditions, one per line.
fn told(status: &PodStatus) -> String {
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
fn before_the_sandbox_speaks() {
    insta::assert_json_snapshot!(concluded(&one("Always"), None, &PodStatus::default()));
}

#[test]
fn a_running_pod() {
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

/// What is told of one case after the other; to be read as a list of rules.
#[test]
fn what_is_told() {
    let creating = |name| waiting(name, "ContainerCreating");
    let initialising = |name| waiting(name, "PodInitializing");
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
    let failed = |reason: &str, state: PodState| PodState {
        failure: Some(Problem {
            reason: reason.to_owned(),
            message: "why".to_owned(),
        }),
        ..state
    };
    let no_sandbox = |state: PodState| PodState {
        sandbox_ready: false,
        ..state
    };

    let cases = [
        (
            "no sandbox yet",
            one("Always"),
            no_sandbox(state(vec![creating("a")])),
        ),
        (
            "an image is missing",
            one("Never"),
            state(vec![waiting("a", "ErrImagePull")]),
        ),
        (
            "one is not ready",
            two("Always"),
            state(vec![running("a"), unready("b")]),
        ),
        (
            "one was not started",
            two("Always"),
            state(vec![running("a"), creating("b")]),
        ),
        ("one is unknown", two("Always"), state(vec![running("a")])),
        (
            "one of two has ended",
            two("Never"),
            state(vec![running("a"), ended("b", 1)]),
        ),
        (
            "all have ended, not all is cleaned up",
            two("Never"),
            state(vec![ended("a", 0), ended("b", 0)]),
        ),
        (
            "Never: success",
            two("Never"),
            finished(state(vec![ended("a", 0), ended("b", 0)])),
        ),
        (
            "Never: failure",
            two("Never"),
            finished(state(vec![ended("a", 0), ended("b", 3)])),
        ),
        (
            "OnFailure: success",
            one("OnFailure"),
            finished(state(vec![ended("a", 0)])),
        ),
        (
            "OnFailure: failure",
            one("OnFailure"),
            state(vec![ended("a", 1)]),
        ),
        (
            "OnFailure: backing off",
            one("OnFailure"),
            state(vec![crashed("a", 2)]),
        ),
        (
            "Always: success is no end",
            one("Always"),
            state(vec![ended("a", 0)]),
        ),
        (
            "Always: backing off",
            one("Always"),
            state(vec![crashed("a", 2)]),
        ),
        (
            "deleted: success",
            one("Always"),
            finished(state(vec![ended("a", 0)])),
        ),
        (
            "deleted: killed",
            one("Always"),
            finished(state(vec![ended("a", 137)])),
        ),
        (
            "deleted before it started",
            one("Always"),
            finished(state(vec![creating("a")])),
        ),
        (
            "own policy restarts",
            own_policy.clone(),
            state(vec![ended("a", 1), ended("b", 0)]),
        ),
        (
            "own policy is content",
            own_policy,
            finished(state(vec![ended("a", 0), ended("b", 0)])),
        ),
        (
            "first init container",
            init("Never"),
            with_init(
                vec![unready("i"), initialising("j")],
                vec![initialising("a")],
            ),
        ),
        (
            "second init container",
            init("Never"),
            with_init(vec![done("i"), unready("j")], vec![initialising("a")]),
        ),
        (
            "initialised",
            init("Never"),
            with_init(vec![done("i"), done("j")], vec![running("a")]),
        ),
        (
            "init fails: Never",
            init("Never"),
            finished(with_init(
                vec![done("i"), ended("j", 1)],
                vec![initialising("a")],
            )),
        ),
        (
            "init fails: Always",
            init("Always"),
            with_init(
                vec![crashed("i", 1), initialising("j")],
                vec![initialising("a")],
            ),
        ),
        (
            "sidecar starts",
            sidecar.clone(),
            with_init(vec![unready("s")], vec![initialising("a")]),
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
            "sidecar outlives the container",
            sidecar.clone(),
            with_init(vec![running("s")], vec![ended("a", 0)]),
        ),
        (
            "sidecar is ended at last",
            sidecar,
            finished(with_init(vec![ended("s", 143)], vec![ended("a", 0)])),
        ),
        ("gates are closed", gated, state(vec![running("a")])),
        (
            "too late",
            one("Never"),
            failed("DeadlineExceeded", state(vec![running("a")])),
        ),
        (
            "too late, and over",
            one("Never"),
            finished(failed("DeadlineExceeded", state(vec![ended("a", 0)]))),
        ),
        (
            "node shut down",
            one("Always"),
            finished(failed("Terminated", state(vec![ended("a", 0)]))),
        ),
    ];
    let told: Vec<_> = cases
        .iter()
        .map(|(name, pod, state)| format!("# {name}\n{}\n", told(&status(pod, state))))
        .collect();
    insta::assert_snapshot!(told.join("\n"));
}

#[test]
fn a_status_never_goes_backwards() {
    let pod = one("Always");
    let mut third = crashed("a", 3);
    third.image_id = "sha256:1".to_owned();
    let before = status(&pod, &state(vec![third.clone()]));
    // A new sandbox that has not been told of earlier runs.
    let after = concluded(&pod, Some(&state(vec![running("a")])), &before);
    let a = &after.container_statuses.as_ref().unwrap()[0];
    assert_eq!(a.restart_count, 3);
    assert_eq!(a.last_state, third.last_state);

    // What ended for good doesn't run again, whatever is said.
    let never = one("Never");
    let before = status(&never, &state(vec![ended("a", 0)]));
    let after = concluded(&never, Some(&state(vec![running("a")])), &before);
    assert_eq!(after.container_statuses, before.container_statuses);

    // Nor does a pod that is over.
    let over = status(&never, &finished(state(vec![ended("a", 1)])));
    let after = concluded(&never, Some(&state(vec![running("a")])), &over);
    assert_eq!(after.phase.as_deref(), Some("Failed"));

    // A container that runs again has its last run as its last state.
    let before = status(&pod, &state(vec![ended("a", 1)]));
    let mut again = running("a");
    again.container_id = Some("coracle://a1".to_owned());
    again.restart_count = 1;
    let after = concluded(&pod, Some(&state(vec![again])), &before);
    let a = &after.container_statuses.unwrap()[0];
    assert_eq!(a.last_state, ended("a", 1).state);
}

#[test]
fn times_are_those_of_the_first_occasion() {
    let pod = one("Always");
    let first = status(&pod, &state(vec![running("a")]));
    let host_ips = [];
    let state = state(vec![unready("a")]);
    let known = Known {
        pod: &pod,
        state: Some(&state),
        previous: &first,
        ending: false,
        host_ips: &host_ips,
        resize: None,
    };
    let later: Timestamp = "2026-01-01T00:02:00Z".parse().unwrap();
    let second = pod_status(&known, later);
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
fn last_words_share_what_a_pod_may_say() {
    let containers: Vec<_> = ["a", "b", "c", "d"]
        .map(|name| json!({ "name": name, "image": "i" }))
        .into();
    let pod = pod(json!({ "restartPolicy": "Never", "containers": containers }));
    let mut spoke = ended("a", 1);
    let end = |status: &mut ContainerStatus| status.state.as_mut().unwrap().terminated.take();
    let mut said = end(&mut spoke).unwrap();
    said.message = Some("ä".repeat(2048));
    spoke.last_state = Some(ContainerState {
        terminated: Some(said.clone()),
        ..Default::default()
    });
    spoke.state.clone_from(&spoke.last_state);
    let told = status(
        &pod,
        &state(vec![spoke, running("b"), running("c"), running("d")]),
    );
    let told = &told.container_statuses.unwrap()[0];
    for state in [&told.state, &told.last_state] {
        let end = state.as_ref().unwrap().terminated.as_ref().unwrap();
        assert_eq!(end.message.as_ref().unwrap().len(), 12 * 1024 / 4);
    }
}

#[test]
fn the_phase_and_its_reason_stay_together() {
    let pod = one("Never");
    let failed = PodState {
        failure: Some(Problem {
            reason: "DeadlineExceeded".to_owned(),
            message: "why".to_owned(),
        }),
        ..finished(state(vec![ended("a", 137)]))
    };
    let first = status(&pod, &failed);
    let second = concluded(&pod, Some(&failed), &first);
    assert_eq!(second.reason.as_deref(), Some("DeadlineExceeded"));
    assert_eq!(told(&second), told(&first));
}

#[test]
fn a_pod_on_the_hosts_network_has_the_hosts_address() {
    let pod = pod(json!({ "hostNetwork": true, "containers": [{ "name": "a" }] }));
    let status = concluded(&pod, None, &PodStatus::default());
    assert_eq!(status.pod_ip.as_deref(), Some("10.0.0.1"));
}

#[test]
fn a_lost_sandbox_is_the_end_of_what_ran() {
    let lives = |policy: &str, state: PodState| {
        let pod = pod(
            json!({ "restartPolicy": policy, "containers": [{ "name": "a" }, { "name": "b" }] }),
        );
        survives(&pod, &status(&pod, &state))
    };
    assert!(lives("Always", state(vec![running("a"), running("b")])));
    assert!(lives("OnFailure", state(vec![running("a"), ended("b", 0)])));
    assert!(!lives("Never", state(vec![running("a"), ended("b", 0)])));
    // What never ran can still run.
    assert!(lives(
        "Never",
        state(vec![
            waiting("a", "ErrImagePull"),
            waiting("b", "ContainerCreating")
        ])
    ));

    let pod = one("Never");
    let before = status(&pod, &state(vec![running("a")]));
    let host_ips = [];
    let known = Known {
        pod: &pod,
        state: None,
        previous: &before,
        ending: false,
        host_ips: &host_ips,
        resize: None,
    };
    insta::assert_json_snapshot!(lost_for_good(&known, None, now()));
}

#[test]
fn a_lost_pod_that_never_started_has_no_ended_containers() {
    let pod = pod(json!({ "initContainers": [{ "name": "i" }], "containers": [{ "name": "a" }] }));
    let before = status(
        &pod,
        &with_init(vec![unready("i")], vec![waiting("a", "PodInitializing")]),
    );
    let known = Known {
        pod: &pod,
        state: None,
        previous: &before,
        ending: true,
        host_ips: &[],
        resize: None,
    };
    let over = lost_for_good(&known, None, now());
    assert_eq!(over.phase.as_deref(), Some("Failed"));
    assert!(
        over.container_statuses.unwrap()[0]
            .state
            .as_ref()
            .unwrap()
            .waiting
            .is_some()
    );
    let init = &over.init_container_statuses.unwrap()[0];
    let end = init.state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!(end.exit_code, 137);
    assert_eq!(end.reason.as_deref(), Some("ContainerStatusUnknown"));
}

#[test]
fn a_patch_replaces_addresses_and_reasons_and_names_the_pod() {
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
fn a_refused_pod_says_why() {
    let problem = Problem {
        reason: "OutOfpods".to_owned(),
        message: "full".to_owned(),
    };
    let status = refusal(&one("Always"), &problem, now());
    assert_eq!(told(&status), "Failed OutOfpods Pod was rejected: full");
}

#[test]
fn a_change_of_resources_is_told_until_it_is_done() {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"uid": "u", "generation": 2},
        "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "2"}}}]},
    }))
    .unwrap();
    let told = |cpu: &str, resize: Option<&Problem>| {
        let state = PodState {
            containers: serde_json::from_value(json!([{
                "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {}}, "resources": {"requests": {"cpu": cpu}},
            }]))
            .unwrap(),
            ..Default::default()
        };
        let known = Known {
            pod: &pod,
            state: Some(&state),
            previous: &PodStatus::default(),
            ending: false,
            host_ips: &[],
            resize,
        };
        let status = pod_status(&known, Timestamp::UNIX_EPOCH);
        let conditions = status.conditions.unwrap().into_iter();
        let resizes = conditions.filter(|condition| condition.type_.starts_with("PodResize"));
        resizes
            .map(|condition| format!("{} {:?}", condition.type_, condition.reason))
            .collect::<Vec<_>>()
    };
    assert_eq!(told("2", None), Vec::<String>::new());
    assert_eq!(told("1", None), ["PodResizeInProgress None"]);
    let problem = Problem {
        reason: "Deferred".to_owned(),
        message: "in use".to_owned(),
    };
    assert_eq!(
        told("1", Some(&problem)),
        ["PodResizePending Some(\"Deferred\")"]
    );
}

#[test]
fn a_pod_that_starts_over_does_not_fail() {
    let pod = pod(json!({
        "restartPolicy": "Never",
        "initContainers": [{ "name": "s", "image": "i", "restartPolicy": "Always", "restartPolicyRules": [
            { "action": "RestartAllContainers", "exitCodes": { "operator": "In", "values": [42] } },
        ] }],
        "containers": [{ "name": "a", "image": "i" }],
    }));
    let again = |name: &str, code| {
        let mut status = waiting(name, "RestartingAllContainers");
        status.last_state = ended(name, code).state;
        status
    };
    let states = [
        with_init(vec![running("s")], vec![running("a")]),
        // The sidecar asks for it; the container has been killed.
        with_init(vec![ended("s", 42)], vec![ended("a", 143)]),
        with_init(vec![again("s", 42)], vec![again("a", 143)]),
        with_init(vec![running("s")], vec![again("a", 143)]),
        with_init(vec![running("s")], vec![running("a")]),
        // Without such a rule that fits, the end of the container is the pod's.
        finished(with_init(vec![ended("s", 0)], vec![ended("a", 143)])),
    ];
    let told: Vec<_> = states
        .iter()
        .map(|state| told(&status(&pod, state)))
        .collect();
    insta::assert_snapshot!(told.join("\n---\n"));
}
