//! All rejections, with reason and message.

use serde_json::{Value, json};

use super::*;
use crate::pods::PodResources;

fn pod(spec: Value) -> Pod {
    serde_json::from_value(json!({ "metadata": { "name": "p" }, "spec": spec })).unwrap()
}

fn requesting(requests: Value) -> Value {
    json!({ "containers": [{ "name": "a", "resources": { "requests": requests } }] })
}

fn capacity() -> NodeCapacity {
    NodeCapacity {
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

fn admitted(pod: &Pod, others: &[&Pod], taints: &[Taint]) -> String {
    let (capacity, labels) = (capacity(), labels());
    let context = AdmissionContext {
        node: "node1",
        labels: &labels,
        taints,
        capacity: &capacity,
        pressures: Pressures::default(),
        others,
    };
    match admit(pod, &context) {
        Ok(()) => "admitted".to_owned(),
        Err(rejection) => format!("{}: {}", rejection.reason, rejection.message),
    }
}

#[test]
fn pressure_rejects_most_pods() {
    let labels = labels();
    let admit_under = |pod: &Pod, pressures: Pressures| {
        let context = AdmissionContext {
            node: "node1",
            labels: &labels,
            taints: &[],
            capacity: &capacity(),
            pressures,
            others: &[],
        };
        admit(pod, &context)
            .map_err(|rejection| format!("{}: {}", rejection.reason, rejection.message))
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
    let rejected = "Evicted: The node had condition: [MemoryPressure]. ".to_owned();
    assert_eq!(
        admit_under(&of_class("BestEffort", json!({})), memory),
        Err(rejected)
    );
    assert_eq!(
        admit_under(&of_class("Burstable", json!({})), memory),
        Ok(())
    );
    let tolerant = json!({ "tolerations": [{ "key": "node.kubernetes.io/memory-pressure", "operator": "Exists" }] });
    assert_eq!(
        admit_under(&of_class("BestEffort", tolerant), memory),
        Ok(())
    );
    let rejected = "Evicted: The node had condition: [DiskPressure MemoryPressure]. ".to_owned();
    assert_eq!(
        admit_under(&of_class("Burstable", json!({})), both),
        Err(rejected)
    );
    let critical = of_class("BestEffort", json!({ "priority": 2_000_000_000 }));
    assert_eq!(admit_under(&critical, both), Ok(()));
}

#[test]
fn rejections_have_upstream_reasons_and_messages() {
    let port = |port: Value| pod(json!({ "containers": [{ "name": "a", "ports": [port] }] }));
    let half_of_node = pod(requesting(
        json!({ "cpu": "1", "memory": "512Mi", "nvidia.com/gpu": "1" }),
    ));
    let web = port(json!({ "containerPort": 80, "hostPort": 8080 }));
    let others = [&half_of_node, &web];
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
            pod(requesting(json!({ "cpu": "1", "memory": "512Mi" }))),
        ),
        ("cpu", pod(requesting(json!({ "cpu": "1001m" })))),
        ("memory", pod(requesting(json!({ "memory": "600Mi" })))),
        (
            "storage",
            pod(requesting(json!({ "ephemeral-storage": "11Gi" }))),
        ),
        (
            "extended",
            pod(requesting(json!({ "nvidia.com/gpu": "1" }))),
        ),
        (
            "unknown resource",
            pod(requesting(json!({ "example.com/dongle": "1" }))),
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
    let results: Vec<_> = cases
        .iter()
        .map(|(name, pod)| format!("{name}\n    {}", admitted(pod, &others, &[])))
        .collect();
    insta::assert_snapshot!(results.join("\n"));
}

#[test]
fn pod_above_maximum_number_is_rejected() {
    let small = pod(json!({ "containers": [{ "name": "a" }] }));
    let result = admitted(&small, &[&small, &small, &small], &[]);
    assert_eq!(
        result,
        "OutOfpods: Node didn't have enough resource: pods, requested: 1, used: 3, capacity: 3"
    );
}

#[test]
fn only_no_execute_taints_reject_pods() {
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
    assert_eq!(admitted(&plain, &[], &[taint("NoSchedule")]), "admitted");
    assert_eq!(
        admitted(&plain, &[], &[taint("NoExecute")]),
        "TaintToleration: Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate"
    );
    for toleration in [
        json!({ "operator": "Exists" }),
        json!({ "key": "k", "value": "v", "effect": "NoExecute" }),
    ] {
        assert_eq!(
            admitted(&tolerant(toleration), &[], &[taint("NoExecute")]),
            "admitted"
        );
    }
    let other = tolerant(json!({ "key": "k", "value": "w" }));
    assert_ne!(admitted(&other, &[], &[taint("NoExecute")]), "admitted");
}

#[test]
fn unknown_launcher_is_rejected() {
    let annotated = |value: &str| {
        let mut pod = pod(json!({ "containers": [{ "name": "a" }] }));
        let annotation = ("coracle.dev/launcher".to_owned(), value.to_owned());
        pod.metadata.annotations = Some([annotation].into());
        admitted(&pod, &[], &[])
    };
    assert_eq!(annotated("fork"), "admitted");
    assert_eq!(annotated("step"), "admitted");
    assert_eq!(
        annotated("Steps"),
        r#"UnknownLauncher: unknown value "Steps" of annotation coracle.dev/launcher (hint: use "fork" or "step")"#
    );
}

#[test]
fn pod_resources_use_largest_requests_and_memory_limit() {
    let container = |name: &str, requests: Value, limits: Value| json!({ "name": name, "resources": { "requests": requests, "limits": limits } });
    let pod = pod(json!({
        "initContainers": [container("i", json!({ "cpu": "3", "memory": "1Gi" }), json!({}))],
        "containers": [
            container("a", json!({ "cpu": "1500m", "memory": "100Mi", "nvidia.com/gpu": "1" }), json!({ "memory": "2Gi", "cpu": "8", "nvidia.com/gpu": "1" })),
            container("b", json!({ "cpu": "200m", "memory": "100Mi", "hugepages-2Mi": "4Mi" }), json!({})),
        ],
    }));
    let resources = pod_resources(&pod);
    assert_eq!(resources.cpu_millis, 3000);
    assert_eq!(resources.memory_bytes, (2 << 30) + (100 << 20));
    assert_eq!(
        resources.extended,
        [("nvidia.com/gpu".to_owned(), 1)].into()
    );
    assert_eq!(
        super::pod_resources(&Pod::default()),
        PodResources::default()
    );
}
