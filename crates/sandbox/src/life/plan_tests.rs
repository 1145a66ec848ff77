//! Table-driven tests of `plan`.

use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::jiff::Timestamp;
use serde_json::{from_value, json};
use tokio::time::Instant;

use super::plan::{Action, Facts, Plan, plan};
use super::record::{Ended, Kill, Kind, Record, Run, Stage};
use super::restart::RestartPolicy;

/// A container in a given state: `-` not started, `p` preparing, `h` in its postStart hook, `r` running, `s` stopping,
/// or the exit code of a terminated one.
fn record(kind: Kind, name: &str, stands: &str, now: Instant) -> Record {
    let spec = from_value(json!({"name": name, "image": "i"})).expect("a container");
    let mut record = Record::new(kind, spec, None);
    let at = Timestamp::UNIX_EPOCH;
    let run = |stage, kill| Run {
        serial: 1,
        image: "i".to_owned(),
        resources: None,
        stage,
        container: None,
        kill,
        startup: None,
        dead: false,
        ready: false,
    };
    match stands {
        "-" => {}
        "p" => record.run = Some(run(Stage::Preparing, None)),
        "h" => record.run = Some(run(Stage::Hook { at }, None)),
        "r" => record.run = Some(run(Stage::Running { at }, None)),
        "s" => {
            let kill = Kill {
                deadline: now,
                turn: true,
                restart: false,
            };
            record.run = Some(run(Stage::Running { at }, Some(kill)));
        }
        code => {
            record.has_run = true;
            record.ended = Some(Ended {
                state: ContainerStateTerminated {
                    exit_code: code.parse().expect("an exit code"),
                    ..Default::default()
                },
                at: now,
                restart: false,
                stale: false,
            });
        }
    }
    record.passed = kind == Kind::Sidecar && stands == "r";
    record
}

/// Parses containers: `i:0 s:r c:-` are an init container that succeeded, a running sidecar and a container not yet
/// started.
fn records(text: &str, now: Instant) -> Vec<Record> {
    text.split_whitespace()
        .enumerate()
        .map(|(index, word)| {
            let (kind, stands) = word.split_once(':').expect("kind:stands");
            let kind = match kind {
                "i" => Kind::Init,
                "s" => Kind::Sidecar,
                "c" => Kind::Regular,
                _ => Kind::Ephemeral,
            };
            record(kind, &format!("n{index}"), stands, now)
        })
        .collect()
}

fn decide(
    records: &[Record],
    policy: RestartPolicy,
    ending: Option<Instant>,
    now: Instant,
) -> Plan {
    plan(&Facts {
        records,
        policy,
        grace: Duration::from_secs(30),
        up: true,
        ending,
        resetting: false,
        now,
    })
}

/// Formats a plan, one word per action.
fn words(plan: &Plan) -> String {
    let words: Vec<String> = plan
        .actions
        .iter()
        .map(|action| match action {
            Action::Start(index) => format!("start{index}"),
            Action::CrashLoop(index) => format!("loop{index}"),
            Action::PullBackOff(index) => format!("pull{index}"),
            Action::Kill { index, kill, .. } if kill.turn => format!("kill{index}"),
            Action::Kill { index, .. } => format!("warn{index}"),
            Action::Pass(index) => format!("pass{index}"),
            Action::BeginReset => "begin-reset".to_owned(),
            Action::Reset => "reset".to_owned(),
            Action::End => "end".to_owned(),
            Action::Finish => "finish".to_owned(),
        })
        .collect();
    words.join(" ")
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
        (Never, "i:1 c:-", "end"),
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
        // No containers.
        (Always, "", "end"),
    ] {
        let records = records(text, now);
        let plan = decide(&records, policy, None, now);
        assert_eq!(words(&plan), want, "{policy:?} {text}");
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
        // Sidecars get the deadline at once (`warn`), but the stop signal only in their turn: in reverse order of their
        // start.
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
async fn crashed_container_restarts_after_its_back_off() {
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
async fn unhealthy_or_changed_containers_are_killed() {
    let now = Instant::now();
    let mut records = records("s:r c:r c:r c:r", now);
    records[0].run.as_mut().expect("a run").dead = true;
    records[1].run.as_mut().expect("a run").dead = true;
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
async fn nothing_starts_before_the_pod_is_set_up() {
    let now = Instant::now();
    let records = records("c:-", now);
    let plan = plan(&Facts {
        records: &records,
        policy: RestartPolicy::Always,
        grace: Duration::ZERO,
        up: false,
        ending: None,
        resetting: false,
        now,
    });
    assert_eq!(plan, Plan::default());
}
