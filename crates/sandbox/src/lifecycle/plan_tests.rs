//! Decisions, as tables.

use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::jiff::Timestamp;
use serde_json::{from_value, json};
use tokio::time::Instant;

use super::plan::{Action, PlanInput, Plan, plan};
use super::container_record::{TerminatedRun, KillOrder, ContainerType, ContainerRecord, ContainerRun, RunStage};
use super::restart::RestartPolicy;

/// A container and how it stands: `-` nothing yet, `p` preparing, `h` in its hook, `r` running, `s` stopping,
/// a number for one that ended with it.
fn record(kind: ContainerType, name: &str, stands: &str, now: Instant) -> ContainerRecord {
    let spec = from_value(json!({"name": name, "image": "i"})).expect("a container");
    let mut record = ContainerRecord::new(kind, spec, None);
    let at = Timestamp::UNIX_EPOCH;
    let run = |stage, kill| ContainerRun {
        serial: 1,
        image: "i".to_owned(),
        resources: None,
        stage,
        container: None,
        kill,
        startup: None,
        liveness_failed: false,
        ready: false,
    };
    match stands {
        "-" => {}
        "p" => record.run = Some(run(RunStage::Preparing, None)),
        "h" => record.run = Some(run(RunStage::Hook { at }, None)),
        "r" => record.run = Some(run(RunStage::Running { at }, None)),
        "s" => {
            let kill = KillOrder {
                deadline: now,
                may_signal: true,
                restart: false,
            };
            record.run = Some(run(RunStage::Running { at }, Some(kill)));
        }
        code => {
            record.has_run = true;
            record.ended = Some(TerminatedRun {
                state: ContainerStateTerminated {
                    exit_code: code.parse().expect("an exit code"),
                    ..Default::default()
                },
                at: now,
                restart: false,
                before_restart: false,
            });
        }
    }
    record.started_once = kind == ContainerType::Sidecar && stands == "r";
    record
}

/// Containers in a word: `i:0 s:r c:-` are an init container that succeeded, a running sidecar and a container to come.
fn records(text: &str, now: Instant) -> Vec<ContainerRecord> {
    text.split_whitespace()
        .enumerate()
        .map(|(index, word)| {
            let (kind, stands) = word.split_once(':').expect("kind:stands");
            let kind = match kind {
                "i" => ContainerType::Init,
                "s" => ContainerType::Sidecar,
                "c" => ContainerType::Regular,
                _ => ContainerType::Ephemeral,
            };
            record(kind, &format!("n{index}"), stands, now)
        })
        .collect()
}

fn decide(
    records: &[ContainerRecord],
    policy: RestartPolicy,
    stop_deadline: Option<Instant>,
    now: Instant,
) -> Plan {
    plan(&PlanInput {
        records,
        policy,
        grace: Duration::from_secs(30),
        up: true,
        ending,
        restarting_all: false,
        now,
    })
}

/// Actions in a word each.
fn words(plan: &Plan) -> String {
    let words: Vec<String> = plan
        .actions
        .iter()
        .map(|action| match action {
            Action::Start(index) => format!("start{index}"),
            Action::ShowCrashLoopBackOff(index) => format!("loop{index}"),
            Action::ShowImagePullBackOff(index) => format!("pull{index}"),
            Action::Kill { index, kill, .. } if kill.may_signal => format!("kill{index}"),
            Action::Kill { index, .. } => format!("warn{index}"),
            Action::MarkStarted(index) => format!("pass{index}"),
            Action::BeginRestartAll => "begin-reset".to_owned(),
            Action::RestartAll => "reset".to_owned(),
            Action::StopPod => "end".to_owned(),
            Action::Finish => "finish".to_owned(),
        })
        .collect();
    words.join(" ")
}

#[tokio::test(start_paused = true)]
async fn a_life() {
    use RestartPolicy::{Always, Never, OnFailure};
    let now = Instant::now();
    for (policy, text, want) in [
        // Nothing, then everything.
        (Always, "c:- c:-", "start0"),
        (Always, "c:p c:-", ""),
        (Always, "c:h c:-", ""),
        (Always, "c:r c:-", "start1"),
        (Always, "c:r c:r", ""),
        // Init containers come first, one by one.
        (Always, "i:- i:- c:-", "start0"),
        (Always, "i:r i:- c:-", ""),
        (Always, "i:0 i:- c:-", "start1"),
        (Always, "i:0 i:0 c:-", "start2"),
        (Always, "i:1 i:- c:-", "start0"),
        (OnFailure, "i:1 c:-", "start0"),
        (Never, "i:1 c:-", "end"),
        (Never, "i:0 c:-", "start1"),
        // Once containers run, init containers are history.
        (Always, "i:- c:r", ""),
        // Sidecars go on, and do not hold up what comes after them once they were up.
        (Always, "s:- i:- c:-", "start0"),
        (Always, "s:p i:- c:-", ""),
        (Always, "s:h i:- c:-", ""),
        (Always, "s:r i:- c:-", "start1"),
        (Always, "s:r i:0 c:r", ""),
        (Always, "s:0 c:r", "start0"),
        (Never, "s:1 c:r", "start0"),
        // Exits.
        (Always, "c:0", "start0"),
        (OnFailure, "c:0", "end"),
        (OnFailure, "c:1", "start0"),
        (Never, "c:1", "end"),
        (Never, "c:0 c:r", ""),
        (Never, "c:0 c:s", ""),
        (Never, "s:r c:0", "end"),
        (Never, "s:1 c:0", "end"),
        // Ephemeral containers start at any time, once.
        (Always, "i:r c:- e:-", "start2"),
        (Always, "c:r e:0", ""),
        (Always, "c:r e:1", ""),
        // Nothing at all.
        (Always, "", "end"),
    ] {
        let records = records(text, now);
        let plan = decide(&records, policy, None, now);
        assert_eq!(words(&plan), want, "{policy:?} {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_end() {
    let now = Instant::now();
    for (text, want) in [
        ("c:-", "finish"),
        ("c:0 c:1", "finish"),
        ("c:r c:r", "kill0 kill1"),
        ("c:p", "kill0"),
        ("c:s", ""),
        // Sidecars are told, but wait for their may_signal: last come, first gone.
        ("s:r s:r c:r", "warn0 warn1 kill2"),
        ("s:r s:r c:0", "warn0 kill1"),
        ("s:r s:0 c:0", "kill0"),
        ("s:r i:r c:-", "kill0 kill1"),
        ("s:r c:0 e:r", "kill0 kill2"),
    ] {
        let records = records(text, now);
        let plan = decide(&records, RestartPolicy::Always, Some(now), now);
        assert_eq!(words(&plan), want, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting() {
    let now = Instant::now();
    let mut records = records("c:1 c:r", now);
    records[0].back_off.step(now, now);
    let plan = decide(&records, RestartPolicy::Always, None, now);
    assert_eq!(words(&plan), "");
    assert_eq!(plan.wake, Some(now + Duration::from_secs(2)));
    let later = now + Duration::from_secs(2);
    let plan = decide(&records, RestartPolicy::Always, None, later);
    assert_eq!(words(&plan), "loop0");
    assert_eq!(plan.wake, Some(now + Duration::from_secs(10)));
    let later = now + Duration::from_secs(10);
    let plan = decide(&records, RestartPolicy::Always, None, later);
    assert_eq!(words(&plan), "start0");
}

#[tokio::test(start_paused = true)]
async fn what_can_not_go_on_is_ended() {
    let now = Instant::now();
    let mut records = records("s:r c:r c:r c:r", now);
    records[0].run.as_mut().expect("a run").liveness_failed = true;
    records[1].run.as_mut().expect("a run").liveness_failed = true;
    records[2].run.as_mut().expect("a run").startup = Some(false);
    records[3].spec.image = Some("other".to_owned());
    let messages = |policy| -> Vec<(String, bool)> {
        decide(&records, policy, None, now)
            .actions
            .into_iter()
            .map(|action| match action {
                Action::Kill { message, kill, .. } => (message, kill.restart),
                other => (format!("{other:?}"), false),
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
async fn nothing_is_started_before_the_pod_is_up() {
    let now = Instant::now();
    let records = records("c:-", now);
    let plan = plan(&PlanInput {
        records: &records,
        policy: RestartPolicy::Always,
        grace: Duration::ZERO,
        up: false,
        stop_deadline: None,
        restarting_all: false,
        now,
    });
    assert_eq!(plan, Plan::default());
}
