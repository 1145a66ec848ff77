//! Lives at random: whatever comes, a pod that is told to end ends, and nothing of it is left.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::lifecycle::simulated_runtime::{Script, SimulatedRuntime, TestPod};

/// What happens to a pod.
#[derive(Clone, Debug)]
enum Happening {
    Image(usize, u8),
    Resend,
    Nothing,
}

fn script() -> impl Strategy<Value = Script> {
    prop_oneof![
        (0..20_u64, 0..3_i32).prop_map(|(after, code)| Script::Exits(after, code)),
        (0..5_u64, 0..3_i32).prop_map(|(after, code)| Script::StopsOnSignal(after, code)),
        Just(Script::IgnoresSignals),
        Just(Script::OomKilled),
        Just(Script::FailsToStart("StartError", "no")),
        Just(Script::FailsToStart("CreateContainerError", "no")),
    ]
}

fn probe() -> impl Strategy<Value = Value> {
    (-1..4_i32, -1..4_i32, 0..4_i32).prop_map(|(delay, period, threshold)| {
        json!({"exec": {"command": ["ask"]}, "initialDelaySeconds": delay, "periodSeconds": period,
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

fn container(init: bool) -> impl Strategy<Value = (Value, Vec<Script>)> {
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

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        (0..3_usize, 0..2_u8).prop_map(|(which, tag)| Happening::Image(which, tag)),
        Just(Happening::Resend),
        Just(Happening::Nothing),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes(
        init in prop::collection::vec(container(true), 0..3),
        regular in prop::collection::vec(container(false), 1..4),
        policy in prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        sick in 0..4_u64,
        happenings in prop::collection::vec((0..40_u64, happening()), 0..6),
        grace in 0..20_i64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let runtime = SimulatedRuntime::new();
            let clock = std::rc::Rc::downgrade(&runtime);
            runtime.exec(move |_, _| {
                let now = clock.upgrade().map_or(0, |runtime| runtime.now());
                (std::time::Duration::from_millis(300), i32::from(sick > 0 && now % 7 < sick))
            });
            let mut lists = json!({"initContainers": [], "containers": [], "restartPolicy": policy});
            for (list, containers) in [("initContainers", init), ("containers", regular)] {
                for (index, (mut container, scripts)) in containers.into_iter().enumerate() {
                    let name = format!("{list}{index}").to_lowercase();
                    runtime.script(&name, &scripts);
                    container["name"] = json!(name);
                    lists[list].as_array_mut().expect("a list").push(container);
                }
            }
            let mut pod = TestPod::new(&runtime, lists);
            let mut second = 0;
            for (pause, happening) in happenings {
                second += pause;
                pod.at(second).await;
                match happening {
                    Happening::Image(which, tag) => pod.change(|bundle| {
                        let spec = bundle.pod.spec.as_mut().expect("a spec");
                        if let Some(container) = spec.containers.get_mut(which) {
                            container.image = Some(format!("image:{tag}"));
                        }
                    }),
                    Happening::Resend => pod.change(|_| {}),
                    Happening::Nothing => {}
                }
            }
            let told = runtime.now();
            let was_finished = pod.state().finished;
            pod.stop(grace);
            pod.finish().await;
            // All have their patience and two seconds; sidecars go one after the other.
            let limit = u64::try_from(grace).expect("a grace") + 2 * 6;
            prop_assert!(was_finished || runtime.now() - told <= limit, "{:#?}", runtime.log());
            Ok(())
        })?;
    }
}
