//! Table-driven tests of `plan`.

use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::restart::RestartPolicy;
use serde_json::{from_value, json};
use tokio::time::Instant;

use super::container_record::{
    ContainerRecord, ContainerRun, ContainerType, KillOrder, RunStage, TerminatedRun,
};
use super::plan::{LifecyclePlan, PlanAction, PlanInput, plan};

/// A container in a given state: `-` not started, `p` preparing, `h` in its postStart hook, `r` running, `s` stopping,
/// or the exit code of a terminated one.
fn record(container_type: ContainerType, name: &str, state: &str, now: Instant) -> ContainerRecord {
    let spec = from_value(json!({"name": name, "image": "i"})).expect("a container");
    let mut record = ContainerRecord::new(container_type, spec, None);
    let started_at = Timestamp::UNIX_EPOCH;
    let run = |stage, kill| ContainerRun {
        serial: 1,
        image: "i".to_owned(),
        resources: None,
        stage,
        container: None,
        kill,
        startup_succeeded: None,
        liveness_failed: false,
        ready: false,
    };
    match state {
        "-" => {}
        "p" => record.run = Some(run(RunStage::Preparing, None)),
        "h" => record.run = Some(run(RunStage::PostStart { started_at }, None)),
        "r" => record.run = Some(run(RunStage::Running { started_at }, None)),
        "s" => {
            let order = KillOrder {
                deadline: now,
                may_signal: true,
                force_restart: false,
            };
            record.run = Some(run(RunStage::Running { started_at }, Some(order)));
        }
        code => {
            record.has_run = true;
            record.last_run = Some(TerminatedRun {
                state: ContainerStateTerminated {
                    exit_code: code.parse().expect("an exit code"),
                    ..Default::default()
                },
                at: now,
                force_restart: false,
                stale: false,
            });
        }
    }
    record.started_once = container_type == ContainerType::Sidecar && state == "r";
    record
}

/// Parses containers: `i:0 s:r c:-` are an init container that succeeded, a running sidecar and a container not yet
/// started.
fn records(text: &str, now: Instant) -> Vec<ContainerRecord> {
    text.split_whitespace()
        .enumerate()
        .map(|(index, container)| {
            let (type_letter, state) = container.split_once(':').expect("type:state");
            let container_type = match type_letter {
                "i" => ContainerType::Init,
                "s" => ContainerType::Sidecar,
                "c" => ContainerType::Regular,
                _ => ContainerType::Ephemeral,
            };
            record(container_type, &format!("n{index}"), state, now)
        })
        .collect()
}

fn decide(
    records: &[ContainerRecord],
    restart_policy: RestartPolicy,
    stop_deadline: Option<Instant>,
    now: Instant,
) -> LifecyclePlan {
    plan(&PlanInput {
        records,
        restart_policy,
        grace_period: Duration::from_secs(30),
        sandbox_ready: true,
        stop_deadline,
        restarting_all: false,
        now,
    })
}

/// Formats a plan, one item per action.
fn summary(plan: &LifecyclePlan) -> String {
    let actions: Vec<String> = plan
        .actions
        .iter()
        .map(|action| match action {
            PlanAction::Start(index) => format!("start{index}"),
            PlanAction::ShowCrashLoopBackOff(index) => format!("crash-loop{index}"),
            PlanAction::ShowImagePullBackOff(index) => format!("pull-back-off{index}"),
            PlanAction::Kill { index, order, .. } if order.may_signal => format!("kill{index}"),
            PlanAction::Kill { index, .. } => format!("set-deadline{index}"),
            PlanAction::MarkStartedOnce(index) => format!("mark-started{index}"),
            PlanAction::BeginRestartAll => "begin-restart-all".to_owned(),
            PlanAction::RestartAll => "restart-all".to_owned(),
            PlanAction::StopPod => "stop-pod".to_owned(),
            PlanAction::Finish => "finish".to_owned(),
        })
        .collect();
    actions.join(" ")
}

#[tokio::test(start_paused = true)]
async fn containers_start_and_restart_in_order() {
    use RestartPolicy::{Always, Never, OnFailure};
    let now = Instant::now();
    for (policy, text, want) in [
        // Containers start in order.
        (Always, "c:- c:-", "start0"),
        (Always, "c:p c:-", ""),
        (Always, "c:h c:-", ""),
        (Always, "c:r c:-", "start1"),
        (Always, "c:r c:r", ""),
        // Init containers run first, one by one.
        (Always, "i:- i:- c:-", "start0"),
        (Always, "i:r i:- c:-", ""),
        (Always, "i:0 i:- c:-", "start1"),
        (Always, "i:0 i:0 c:-", "start2"),
        (Always, "i:1 i:- c:-", "start0"),
        (OnFailure, "i:1 c:-", "start0"),
        (Never, "i:1 c:-", "stop-pod"),
        (Never, "i:0 c:-", "start1"),
        // Once containers run, init containers do not run again.
        (Always, "i:- c:r", ""),
        // Sidecars keep running, and block later containers only until they have started.
        (Always, "s:- i:- c:-", "start0"),
        (Always, "s:p i:- c:-", ""),
        (Always, "s:h i:- c:-", ""),
        (Always, "s:r i:- c:-", "start1"),
        (Always, "s:r i:0 c:r", ""),
        (Always, "s:0 c:r", "start0"),
        (Never, "s:1 c:r", "start0"),
        // Containers terminate.
        (Always, "c:0", "start0"),
        (OnFailure, "c:0", "stop-pod"),
        (OnFailure, "c:1", "start0"),
        (Never, "c:1", "stop-pod"),
        (Never, "c:0 c:r", ""),
        (Never, "c:0 c:s", ""),
        (Never, "s:r c:0", "stop-pod"),
        (Never, "s:1 c:0", "stop-pod"),
        // Ephemeral containers start at any time, once.
        (Always, "i:r c:- e:-", "start2"),
        (Always, "c:r e:0", ""),
        (Always, "c:r e:1", ""),
        // No containers.
        (Always, "", "stop-pod"),
    ] {
        let records = records(text, now);
        let plan = decide(&records, policy, None, now);
        assert_eq!(summary(&plan), want, "{policy:?} {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn sidecars_stop_after_regular_containers() {
    let now = Instant::now();
    for (text, want) in [
        ("c:-", "finish"),
        ("c:0 c:1", "finish"),
        ("c:r c:r", "kill0 kill1"),
        ("c:p", "kill0"),
        ("c:s", ""),
        // Sidecars get the deadline at once (`set-deadline`), but the stop signal one after the other, in reverse order of
        // their start.
        ("s:r s:r c:r", "set-deadline0 set-deadline1 kill2"),
        ("s:r s:r c:0", "set-deadline0 kill1"),
        ("s:r s:0 c:0", "kill0"),
        ("s:r i:r c:-", "kill0 kill1"),
        ("s:r c:0 e:r", "kill0 kill2"),
    ] {
        let records = records(text, now);
        let plan = decide(&records, RestartPolicy::Always, Some(now), now);
        assert_eq!(summary(&plan), want, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn crashed_container_restarts_after_its_back_off() {
    let now = Instant::now();
    let mut records = records("c:1 c:r", now);
    records[0].back_off.record_attempt(now, now);
    let plan = decide(&records, RestartPolicy::Always, None, now);
    assert_eq!(summary(&plan), "");
    assert_eq!(plan.wake_at, Some(now + Duration::from_secs(2)));
    let later = now + Duration::from_secs(2);
    let plan = decide(&records, RestartPolicy::Always, None, later);
    assert_eq!(summary(&plan), "crash-loop0");
    assert_eq!(plan.wake_at, Some(now + Duration::from_secs(10)));
    let later = now + Duration::from_secs(10);
    let plan = decide(&records, RestartPolicy::Always, None, later);
    assert_eq!(summary(&plan), "start0");
}

#[tokio::test(start_paused = true)]
async fn unhealthy_or_changed_containers_are_killed() {
    let now = Instant::now();
    let mut records = records("s:r c:r c:r c:r", now);
    records[0].run.as_mut().expect("a run").liveness_failed = true;
    records[1].run.as_mut().expect("a run").liveness_failed = true;
    records[2].run.as_mut().expect("a run").startup_succeeded = Some(false);
    records[3].spec.image = Some("other".to_owned());
    let messages = |policy| -> Vec<(String, bool)> {
        decide(&records, policy, None, now)
            .actions
            .into_iter()
            .map(|action| match action {
                PlanAction::Kill { message, order, .. } => (message, order.force_restart),
                action => (format!("{action:?}"), false),
            })
            .collect()
    };
    assert_eq!(
        messages(RestartPolicy::Always),
        [
            ("Init container n0 failed liveness probe".to_owned(), true),
            (
                "Container n1 failed liveness probe, will be restarted".to_owned(),
                true
            ),
            (
                "Container n2 failed startup probe, will be restarted".to_owned(),
                true
            ),
            (
                "Container n3 definition changed, will be restarted".to_owned(),
                true
            ),
        ]
    );
    assert_eq!(
        messages(RestartPolicy::Never)[1..],
        [
            ("Container n1 failed liveness probe".to_owned(), false),
            ("Container n2 failed startup probe".to_owned(), false),
            (
                "Container n3 definition changed, will be restarted".to_owned(),
                true
            ),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_before_the_pod_is_set_up() {
    let now = Instant::now();
    let records = records("c:-", now);
    let plan = plan(&PlanInput {
        records: &records,
        restart_policy: RestartPolicy::Always,
        grace_period: Duration::ZERO,
        sandbox_ready: false,
        stop_deadline: None,
        restarting_all: false,
        now,
    });
    assert_eq!(plan, LifecyclePlan::default());
}
