//! Random lifecycles: a pod that is stopped always ends in time.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::lifecycle::simulated_runtime::{ScriptedRun, SimulatedRuntime, TestPod};

#[derive(Clone, Debug)]
enum Update {
    Image { index: usize, tag: u8 },
    ResendBundle,
    Nothing,
}

fn script() -> impl Strategy<Value = ScriptedRun> {
    prop_oneof![
        (0..20_u64, 0..3_i32).prop_map(|(after, code)| ScriptedRun::Exits(after, code)),
        (0..5_u64, 0..3_i32).prop_map(|(after, code)| ScriptedRun::ExitsOnStop(after, code)),
        Just(ScriptedRun::IgnoresStop),
        Just(ScriptedRun::OomKilled),
        Just(ScriptedRun::StartFails("StartError", "no")),
        Just(ScriptedRun::StartFails("CreateContainerError", "no")),
    ]
}

fn probe() -> impl Strategy<Value = Value> {
    (-1..4_i32, -1..4_i32, 0..4_i32).prop_map(|(delay, period, threshold)| {
        json!({"exec": {"command": ["probe"]}, "initialDelaySeconds": delay, "periodSeconds": period,
            "failureThreshold": threshold})
    })
}

fn hook() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({"exec": {"command": ["hook"]}})),
        (-1..10_i64).prop_map(|seconds| json!({"sleep": {"seconds": seconds}})),
        Just(json!({"httpGet": {"port": 80}})),
        Just(json!({})),
    ]
}

fn container(init: bool) -> impl Strategy<Value = (Value, Vec<ScriptedRun>)> {
    (
        prop::option::of(probe()),
        prop::option::of(probe()),
        prop::option::of(hook()),
        prop::option::of(hook()),
        prop::option::of(prop_oneof![
            Just("Always"),
            Just("Never"),
            Just("OnFailure")
        ]),
        prop::bool::weighted(0.1),
        prop::collection::vec(script(), 1..4),
    )
        .prop_map(
            move |(startup, liveness, post, pre, policy, rule, scripts)| {
                let mut container = json!({});
                if let Some(policy) = policy {
                    container["restartPolicy"] = json!(policy);
                    if rule {
                        container["restartPolicyRules"] = json!([{"action": "RestartAllContainers",
                        "exitCodes": {"operator": "In", "values": [1]}}]);
                    }
                }
                if !init || policy == Some("Always") {
                    container["lifecycle"] = json!({"postStart": post, "preStop": pre});
                    container["startupProbe"] = json!(startup);
                    container["livenessProbe"] = json!(liveness);
                }
                (container, scripts)
            },
        )
}

fn update() -> impl Strategy<Value = Update> {
    prop_oneof![
        (0..3_usize, 0..2_u8).prop_map(|(index, tag)| Update::Image { index, tag }),
        Just(Update::ResendBundle),
        Just(Update::Nothing),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stopped_pod_always_ends_in_time(
        init in prop::collection::vec(container(true), 0..3),
        regular in prop::collection::vec(container(false), 1..4),
        policy in prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        failing_seconds in 0..4_u64,
        updates in prop::collection::vec((0..40_u64, update()), 0..6),
        grace_seconds in 0..20_i64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let sim = SimulatedRuntime::new();
            let clock = std::rc::Rc::downgrade(&sim);
            sim.exec(move |_, _| {
                let now = clock.upgrade().map_or(0, |sim| sim.now());
                (std::time::Duration::from_millis(300), i32::from(now % 7 < failing_seconds))
            });
            let mut spec = json!({"initContainers": [], "containers": [], "restartPolicy": policy});
            for (list, containers) in [("initContainers", init), ("containers", regular)] {
                for (index, (mut container, scripts)) in containers.into_iter().enumerate() {
                    let name = format!("{list}{index}").to_lowercase();
                    sim.script(&name, &scripts);
                    container["name"] = json!(name);
                    spec[list].as_array_mut().expect("a list").push(container);
                }
            }
            let mut pod = TestPod::new(&sim, spec);
            let mut second = 0;
            for (pause, update) in updates {
                second += pause;
                pod.advance_to(second).await;
                match update {
                    Update::Image { index, tag } => pod.update(|bundle| {
                        let spec = bundle.pod.spec.as_mut().expect("a spec");
                        if let Some(container) = spec.containers.get_mut(index) {
                            container.image = Some(format!("image:{tag}"));
                        }
                    }),
                    Update::ResendBundle => pod.update(|_| {}),
                    Update::Nothing => {}
                }
            }
            let stopped_at = sim.now();
            let was_finished = pod.state().finished;
            pod.stop(grace_seconds);
            pod.finished().await;
            // Each container gets the grace period and two seconds; sidecars stop one after the other.
            let limit = u64::try_from(grace_seconds).expect("a grace period") + 2 * 6;
            prop_assert!(was_finished || sim.now() - stopped_at <= limit, "{:#?}", sim.log());
            Ok(())
        })?;
    }
}
