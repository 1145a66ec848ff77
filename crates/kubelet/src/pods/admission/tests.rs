//! Every way to be refused, and its words.

use serde_json::{Value, json};

use super::*;
use crate::pods::launch::Needs;

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({ "metadata": { "name": "p" }, "spec": spec })).unwrap()
}

fn asking(requests: Value) -> Value {
    json!({ "containers": [{ "name": "a", "resources": { "requests": requests } }] })
}

fn capacity() -> Capacity {
    Capacity {
        cpus: 2,
        memory_bytes: 1 << 30,
        ephemeral_storage_bytes: 10 << 30,
        pods: 3,
        extended: BTreeMap::from([("nvidia.com/gpu".to_owned(), 1)]),
    }
}

fn labels() -> BTreeMap<String, String> {
    [("zone", "a"), ("rank", "5")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

fn judge(pod: &Pod, others: &[&Pod], taints: &[Taint]) -> String {
    let (capacity, labels) = (capacity(), labels());
    let space = Space {
        node: "node1",
        labels: &labels,
        taints,
        capacity: &capacity,
        pressures: Pressures::default(),
        others,
    };
    match admit(pod, &space) {
        Ok(()) => "welcome".to_owned(),
        Err(problem) => format!("{}: {}", problem.reason, problem.message),
    }
}

#[test]
fn a_machine_that_is_short_takes_few() {
    let labels = labels();
    let under = |pod: &Pod, pressures: Pressures| {
        let space = Space {
            node: "node1",
            labels: &labels,
            taints: &[],
            capacity: &capacity(),
            pressures,
            others: &[],
        };
        admit(pod, &space).map_err(|problem| format!("{}: {}", problem.reason, problem.message))
    };
    let of_class = |class: &str, more: Value| {
        let mut pod = pod(json!({ "containers": [{ "name": "a" }] }));
        let spec = pod.spec.as_mut().unwrap();
        spec.priority = more["priority"]
            .as_i64()
            .and_then(|n| i32::try_from(n).ok());
        spec.tolerations = serde_json::from_value(more["tolerations"].clone()).unwrap();
        pod.status = serde_json::from_value(json!({ "qosClass": class })).unwrap();
        pod
    };
    let memory = Pressures {
        memory: true,
        ..Default::default()
    };
    let both = Pressures {
        disk: true,
        ..memory
    };
    let short = "Evicted: The node had condition: [MemoryPressure]. ".to_owned();
    assert_eq!(
        under(&of_class("BestEffort", json!({})), memory),
        Err(short)
    );
    assert_eq!(under(&of_class("Burstable", json!({})), memory), Ok(()));
    let tolerant = json!({ "tolerations": [{ "key": "node.kubernetes.io/memory-pressure", "operator": "Exists" }] });
    assert_eq!(under(&of_class("BestEffort", tolerant), memory), Ok(()));
    let short = "Evicted: The node had condition: [DiskPressure MemoryPressure]. ".to_owned();
    assert_eq!(under(&of_class("Burstable", json!({})), both), Err(short));
    let critical = of_class("BestEffort", json!({ "priority": 2_000_000_000 }));
    assert_eq!(under(&critical, both), Ok(()));
}

#[test]
fn every_refusal_has_upstreams_words() {
    let port = |port: Value| pod(json!({ "containers": [{ "name": "a", "ports": [port] }] }));
    let half = pod(asking(
        json!({ "cpu": "1", "memory": "512Mi", "nvidia.com/gpu": "1" }),
    ));
    let web = port(json!({ "containerPort": 80, "hostPort": 8080 }));
    let others = [&half, &web];
    let sysctl = |name: &str, more: Value| {
        let mut spec = json!({
            "containers": [{ "name": "a" }],
            "securityContext": { "sysctls": [{ "name": name, "value": "1" }] },
        });
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        pod(spec)
    };
    let affine = |expression: Value| {
        pod(json!({
            "containers": [{ "name": "a" }],
            "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{ "matchExpressions": [expression] }],
            } } },
        }))
    };
    let mut windows = pod(json!({ "containers": [{ "name": "a" }] }));
    windows.metadata.labels = Some([("kubernetes.io/os".to_owned(), "windows".to_owned())].into());

    let cases = [
        (
            "fits",
            pod(asking(json!({ "cpu": "1", "memory": "512Mi" }))),
        ),
        ("cpu", pod(asking(json!({ "cpu": "1001m" })))),
        ("memory", pod(asking(json!({ "memory": "600Mi" })))),
        (
            "storage",
            pod(asking(json!({ "ephemeral-storage": "11Gi" }))),
        ),
        ("extended", pod(asking(json!({ "nvidia.com/gpu": "1" })))),
        (
            "unknown resource",
            pod(asking(json!({ "example.com/dongle": "1" }))),
        ),
        (
            "init containers count",
            pod(json!({
                "initContainers": [
                    { "name": "s", "restartPolicy": "Always", "resources": { "requests": { "cpu": "600m" } } },
                    { "name": "i", "resources": { "requests": { "cpu": "500m" } } },
                ],
                "containers": [{ "name": "a" }],
            })),
        ),
        (
            "overhead counts",
            pod(json!({
                "containers": [{ "name": "a" }], "overhead": { "cpu": "1500m" },
            })),
        ),
        (
            "the pod's own resources decide",
            pod(json!({
                "containers": [{ "name": "a", "resources": { "requests": { "cpu": "5" } } }],
                "resources": { "requests": { "cpu": "1" } },
            })),
        ),
        (
            "port",
            port(json!({ "containerPort": 1, "hostPort": 8080, "hostIP": "10.0.0.1" })),
        ),
        (
            "port of another protocol",
            port(json!({ "containerPort": 1, "hostPort": 8080, "protocol": "UDP" })),
        ),
        (
            "selector",
            pod(json!({ "containers": [{ "name": "a" }], "nodeSelector": { "zone": "b" } })),
        ),
        (
            "In",
            affine(json!({ "key": "zone", "operator": "In", "values": ["a", "b"] })),
        ),
        (
            "NotIn",
            affine(json!({ "key": "zone", "operator": "NotIn", "values": ["a"] })),
        ),
        (
            "Gt",
            affine(json!({ "key": "rank", "operator": "Gt", "values": ["4"] })),
        ),
        (
            "Lt",
            affine(json!({ "key": "rank", "operator": "Lt", "values": ["5"] })),
        ),
        (
            "Exists",
            affine(json!({ "key": "none", "operator": "Exists" })),
        ),
        ("label of another system", windows),
        (
            "another system",
            pod(json!({ "containers": [{ "name": "a" }], "os": { "name": "windows" } })),
        ),
        (
            "strict groups",
            pod(json!({
                "containers": [{ "name": "a" }], "securityContext": { "supplementalGroupsPolicy": "Strict" },
            })),
        ),
        (
            "AppArmor",
            pod(json!({ "containers": [{ "name": "a", "securityContext": {
            "appArmorProfile": { "type": "Localhost", "localhostProfile": "p" },
        } }] })),
        ),
        (
            "claims",
            pod(json!({ "containers": [{ "name": "a" }], "resourceClaims": [{ "name": "c" }] })),
        ),
        (
            "devices",
            pod(
                json!({ "containers": [{ "name": "a", "volumeDevices": [{ "name": "d", "devicePath": "/d" }] }] }),
            ),
        ),
        (
            "user namespace",
            pod(json!({ "containers": [{ "name": "a" }], "hostUsers": false })),
        ),
        ("safe sysctl", sysctl("net/ipv4/tcp_syncookies", json!({}))),
        ("unsafe sysctl", sysctl("kernel.msgmax", json!({}))),
        (
            "sysctl of the host",
            sysctl("net.ipv4.tcp_syncookies", json!({ "hostNetwork": true })),
        ),
        (
            "shared sysctl",
            sysctl("kernel.shm_rmid_forced", json!({ "hostIPC": true })),
        ),
    ];
    let told: Vec<_> = cases
        .iter()
        .map(|(name, pod)| format!("{name}\n    {}", judge(pod, &others, &[])))
        .collect();
    insta::assert_snapshot!(told.join("\n"));
}

#[test]
fn a_node_can_be_full() {
    let small = pod(json!({ "containers": [{ "name": "a" }] }));
    let told = judge(&small, &[&small, &small, &small], &[]);
    assert_eq!(
        told,
        "OutOfpods: Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3"
    );
}

#[test]
fn only_no_execute_keeps_a_bound_pod_away() {
    let taint = |effect: &str| Taint {
        key: "k".to_owned(),
        value: Some("v".to_owned()),
        effect: effect.to_owned(),
        ..Default::default()
    };
    let plain = pod(json!({ "containers": [{ "name": "a" }] }));
    let tolerant = |toleration: Value| {
        pod(json!({ "containers": [{ "name": "a" }], "tolerations": [toleration] }))
    };
    assert_eq!(judge(&plain, &[], &[taint("NoSchedule")]), "welcome");
    assert_eq!(
        judge(&plain, &[], &[taint("NoExecute")]),
        "TaintToleration: Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate"
    );
    for toleration in [
        json!({ "operator": "Exists" }),
        json!({ "key": "k", "value": "v", "effect": "NoExecute" }),
    ] {
        assert_eq!(
            judge(&tolerant(toleration), &[], &[taint("NoExecute")]),
            "welcome"
        );
    }
    let other = tolerant(json!({ "key": "k", "value": "w" }));
    assert_ne!(judge(&other, &[], &[taint("NoExecute")]), "welcome");
}

#[test]
fn a_launcher_that_is_not_known_is_refused() {
    let annotated = |value: &str| {
        let mut pod = pod(json!({ "containers": [{ "name": "a" }] }));
        let annotation = ("coracle.dev/launcher".to_owned(), value.to_owned());
        pod.metadata.annotations = Some([annotation].into());
        judge(&pod, &[], &[])
    };
    assert_eq!(annotated("fork"), "welcome");
    assert_eq!(annotated("step"), "welcome");
    assert_eq!(
        annotated("Steps"),
        r#"UnknownLauncher: the annotation coracle.dev/launcher is "Steps"; this node knows "fork" and "step""#
    );
}

#[test]
fn a_pods_needs_are_the_most_that_it_asks_for_at_once_and_memory_that_it_may_use() {
    let container = |name: &str, requests: Value, limits: Value| json!({ "name": name, "resources": { "requests": requests, "limits": limits } });
    let pod = pod(json!({
        "initContainers": [container("i", json!({ "cpu": "3", "memory": "1Gi" }), json!({}))],
        "containers": [
            container("a", json!({ "cpu": "1500m", "memory": "100Mi", "nvidia.com/gpu": "1" }), json!({ "memory": "2Gi", "cpu": "8", "nvidia.com/gpu": "1" })),
            container("b", json!({ "cpu": "200m", "memory": "100Mi", "hugepages-2Mi": "4Mi" }), json!({})),
        ],
    }));
    let needs = needs(&pod);
    assert_eq!(needs.cpu_millis, 3000);
    assert_eq!(needs.memory_bytes, (2 << 30) + (100 << 20));
    assert_eq!(needs.extended, [("nvidia.com/gpu".to_owned(), 1)].into());
    assert_eq!(super::needs(&Pod::default()), Needs::default());
}
