use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::*;

fn pod(spec: Value) -> Arc<Pod> {
    let pod = json!({
        "metadata": { "name": "web", "namespace": "shop", "uid": "1-2-3", "labels": { "app": "web" } },
        "spec": spec,
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn inputs(spec: Value) -> ResolveInputs {
    let config_map = ConfigMap {
        data: Some(BTreeMap::from([
            ("color".to_owned(), "$(blue)".to_owned()),
            ("a.b".to_owned(), "dots".to_owned()),
        ])),
        ..Default::default()
    };
    let secret = |key: &str, value: &[u8]| {
        Arc::new(Secret {
            data: Some(BTreeMap::from([(
                key.to_owned(),
                ByteString(value.to_vec()),
            )])),
            ..Default::default()
        })
    };
    let docker = br#"{"auths":{"registry.example":{"auth":"bWU6c2VjcmV0"},"b.example/team":{"identitytoken":"t"}}}"#;
    ResolveInputs {
        volumes: VolumeInputs {
            pod: pod(spec),
            allocatable: BTreeMap::from([
                ("cpu".to_owned(), Quantity("4".to_owned())),
                ("memory".to_owned(), Quantity("1Gi".to_owned())),
            ]),
            config_maps: BTreeMap::from([("config".to_owned(), Arc::new(config_map))]),
            secrets: BTreeMap::from([
                ("keys".to_owned(), secret("password", b"x$y")),
                ("binary".to_owned(), secret("zero", b"a\0b")),
                ("pull".to_owned(), secret(".dockerconfigjson", docker)),
                (
                    "old".to_owned(),
                    secret(
                        ".dockercfg",
                        br#"{"c.example":{"username":"u","password":"p"}}"#,
                    ),
                ),
            ]),
            tokens: BTreeMap::from([(("api".to_owned(), 0), Ok("ey".to_owned()))]),
            ..Default::default()
        },
        services: Some(BTreeMap::from([(
            "KUBERNETES_SERVICE_HOST".to_owned(),
            "100.96.0.1".to_owned(),
        )])),
        ..Default::default()
    }
}

fn container_input(container: Value) -> ContainerInput {
    let resolved = inputs(json!({ "nodeName": "node1", "containers": [container] }))
        .resolve(NodeFacts::default(), &[]);
    resolved.bundle.containers["main"].clone()
}

#[test]
fn variables_in_order() {
    let input = container_input(json!({
        "name": "main",
        "envFrom": [
            { "prefix": "P_", "configMapRef": { "name": "config" } },
            { "secretRef": { "name": "keys" } },
            { "secretRef": { "name": "none", "optional": true } },
        ],
        "resources": { "requests": { "cpu": "250m" } },
        "env": [
            { "name": "PLAIN", "value": "see $(password)" },
            { "name": "EMPTY" },
            { "name": "NODE", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } },
            { "name": "APP", "valueFrom": { "fieldRef": { "fieldPath": "metadata.labels['app']" } } },
            { "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } },
            { "name": "FILE", "valueFrom": { "fileKeyRef": { "volumeName": "v", "path": "p", "key": "k" } } },
            { "name": "CPU", "valueFrom": { "resourceFieldRef": { "resource": "requests.cpu", "divisor": "1m" } } },
            { "name": "CPUS", "valueFrom": { "resourceFieldRef": { "resource": "limits.cpu" } } },
            { "name": "KEY", "valueFrom": { "configMapKeyRef": { "name": "config", "key": "color" } } },
            { "name": "SECRET", "valueFrom": { "secretKeyRef": { "name": "keys", "key": "password" } } },
            { "name": "LEFT_OUT", "valueFrom": { "secretKeyRef": { "name": "keys", "key": "none", "optional": true } } },
        ],
    }));
    assert_eq!(input.problem, None);
    insta::assert_json_snapshot!(input.env);
}

#[test]
fn problems_of_containers() {
    let by = |from: Value| {
        let input =
            container_input(json!({ "name": "main", "env": [{ "name": "V", "valueFrom": from }] }));
        let problem = input.problem.unwrap();
        assert_eq!(problem.reason, "CreateContainerConfigError");
        problem.message
    };
    let all_of = |from: Value| {
        container_input(json!({ "name": "main", "envFrom": [from] }))
            .problem
            .unwrap()
            .message
    };
    insta::assert_debug_snapshot!([
        by(json!({ "configMapKeyRef": { "name": "none", "key": "k" } })),
        by(json!({ "configMapKeyRef": { "name": "config", "key": "k" } })),
        by(json!({ "secretKeyRef": { "name": "none", "key": "k" } })),
        by(json!({ "secretKeyRef": { "name": "keys", "key": "k" } })),
        by(json!({ "secretKeyRef": { "name": "binary", "key": "zero" } })),
        by(json!({ "fieldRef": { "fieldPath": "spec.nothing" } })),
        all_of(json!({ "configMapRef": { "name": "none" } })),
        all_of(json!({ "secretRef": { "name": "none" } })),
    ]);
}

#[test]
fn unsynced_objects_only_affect_their_users() {
    let mut inputs = inputs(json!({
        "containers": [
            { "name": "a", "envFrom": [{ "configMapRef": { "name": "slow", "optional": true } }] },
            { "name": "b", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] },
        ],
        "volumes": [{ "name": "v", "configMap": { "name": "slow" } }],
    }));
    inputs
        .unknown_config_maps
        .insert("slow".to_owned(), "no answer".to_owned());
    let resolved = inputs.resolve(NodeFacts::default(), &[]);
    let problem = |name: &str| resolved.bundle.containers[name].problem.clone();
    assert_eq!(problem("a").unwrap().message, "no answer");
    assert_eq!(problem("b"), None);
    assert_eq!(
        resolved.failed_mounts,
        ["MountVolume.SetUp failed for volume \"v\" : no answer"]
    );
    inputs.services = None;
    let resolved = inputs.resolve(NodeFacts::default(), &[]);
    insta::assert_snapshot!(
        resolved.bundle.containers["b"]
            .problem
            .as_ref()
            .unwrap()
            .message
    );
}

fn with_volumes(volumes: Value) -> ResolvedPod {
    let mounts: Vec<_> = volumes
        .as_array()
        .unwrap()
        .iter()
        .map(|volume| json!({ "name": volume["name"], "mountPath": format!("/{}", volume["name"].as_str().unwrap()) }))
        .chain([json!({ "name": "nested", "mountPath": "/keys/sub/dir" })])
        .collect();
    let mut all = volumes;
    all.as_array_mut().unwrap().extend([
        json!({ "name": "nested", "emptyDir": {} }),
        json!({ "name": "unused", "configMap": { "name": "none" } }),
    ]);
    inputs(json!({
        "containers": [{ "name": "main", "volumeMounts": mounts, "resources": { "limits": { "memory": "64Mi" } } }],
        "volumes": all,
    }))
    .resolve(NodeFacts::default(), &[])
}

#[test]
fn volumes_become_sources() {
    let resolved = with_volumes(json!([
        { "name": "keys", "secret": { "secretName": "keys", "defaultMode": 256 } },
        { "name": "config", "configMap": { "name": "config", "items": [{ "key": "color", "path": "c" }] } },
        { "name": "maybe", "configMap": { "name": "none", "optional": true } },
        { "name": "info", "downwardAPI": { "items": [{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }] } },
        { "name": "api", "projected": { "sources": [{ "serviceAccountToken": { "path": "token" } }] } },
        { "name": "disk", "emptyDir": { "sizeLimit": "1Mi" } },
        { "name": "memory", "emptyDir": { "medium": "Memory" } },
        { "name": "small", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        { "name": "host", "hostPath": { "path": "/etc", "type": "Directory" } },
        { "name": "image", "image": { "reference": "busybox:1", "pullPolicy": "Always" } },
        { "name": "nfs", "nfs": { "server": "nas", "path": "/export", "readOnly": true } },
    ]));
    assert_eq!(resolved.failed_mounts, Vec::<String>::new());
    // The sandbox can decode the sources.
    for source in resolved.bundle.volumes.values() {
        serde_json::from_value::<volumes::VolumeSource>(source.clone()).unwrap();
    }
    insta::assert_json_snapshot!(resolved.bundle.volumes);
}

#[test]
fn unavailable_volumes() {
    let resolved = with_volumes(json!([
        { "name": "a", "configMap": { "name": "none" } },
        { "name": "b", "secret": { "secretName": "none" } },
        { "name": "c", "secret": { "secretName": "keys", "items": [{ "key": "none", "path": "p" }] } },
        { "name": "d", "projected": { "sources": [{ "serviceAccountToken": { "path": "token" } }] } },
        { "name": "e", "csi": { "driver": "x.example" } },
        { "name": "f", "emptyDir": { "medium": "HugePages" } },
        { "name": "g", "hostPath": { "path": "/etc", "type": "Pipe" } },
        { "name": "h", "fc": {} },
    ]));
    insta::assert_debug_snapshot!(resolved.failed_mounts);
    assert_eq!(
        resolved.bundle.volumes.keys().collect::<Vec<_>>(),
        ["nested"]
    );
}

#[test]
fn claims_become_directories() {
    let resolve = |volume: Value, read_only, policy: Option<&str>| {
        let mut inputs = inputs(json!({
            "containers": [{ "name": "main", "volumeMounts": [{ "name": "data", "mountPath": "/data" }] }],
            "securityContext": { "fsGroupChangePolicy": policy },
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "c" } }],
        }));
        let volume = serde_json::from_value(volume).unwrap();
        let claimed = claims::BoundClaim { volume, read_only };
        inputs.claims.insert("data".to_owned(), Ok(claimed));
        let resolved = inputs.resolve(NodeFacts::default(), &[]);
        match resolved.failed_mounts.first() {
            Some(message) => Value::from(message.clone()),
            None => resolved.bundle.volumes["data"].clone(),
        }
    };
    let pv = |spec: Value, annotations: Value| json!({ "metadata": { "name": "pv1", "annotations": annotations }, "spec": spec });
    let ours = json!({ "pv.kubernetes.io/provisioned-by": "coracle.dev/shared" });
    let mounted = json!({ "coracle.dev/mounted-at": "/mnt" });
    insta::assert_json_snapshot!([
        resolve(
            pv(json!({ "hostPath": { "path": "/a" } }), json!({})),
            false,
            None
        ),
        resolve(
            pv(json!({ "hostPath": { "path": "/a" } }), ours),
            true,
            None
        ),
        resolve(
            pv(json!({ "local": { "path": "/b" } }), json!({})),
            false,
            Some("OnRootMismatch")
        ),
        resolve(
            pv(json!({ "nfs": { "server": "s", "path": "/c" } }), mounted),
            true,
            None
        ),
        resolve(
            pv(
                json!({ "csi": { "driver": "x.example", "volumeHandle": "h" } }),
                json!({})
            ),
            false,
            None
        ),
        resolve(
            pv(
                json!({ "volumeMode": "Block", "local": { "path": "/dev/sda" } }),
                json!({})
            ),
            false,
            None
        ),
    ]);
}

#[test]
fn unreadable_pull_secrets_cause_warning() {
    let resolved = inputs(json!({
        "containers": [],
        "imagePullSecrets": [{ "name": "pull" }, { "name": "old" }, { "name": "keys" }, { "name": "none" }],
    }))
    .resolve(NodeFacts::default(), &[]);
    insta::assert_json_snapshot!(json!([resolved.bundle.pull_credentials, resolved.warnings]));
}

#[test]
fn references_of_a_pod() {
    let pod = pod(json!({
        "containers": [{
            "name": "main",
            "envFrom": [{ "configMapRef": { "name": "c1" } }, { "secretRef": { "name": "s1" } }],
            "env": [{ "name": "A", "valueFrom": { "secretKeyRef": { "name": "s2", "key": "k" } } }],
            "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
        }],
        "initContainers": [{
            "name": "first",
            "env": [{ "name": "A", "valueFrom": { "configMapKeyRef": { "name": "c2", "key": "k" } } }],
        }],
        "ephemeralContainers": [{ "name": "debug", "envFrom": [{ "secretRef": { "name": "s4" } }] }],
        "imagePullSecrets": [{ "name": "s3" }, { "name": "" }],
        "volumes": [
            { "name": "v", "projected": { "sources": [{ "configMap": { "name": "c3" } }, { "secret": { "name": "s5" } }] } },
            { "name": "unused", "secret": { "secretName": "s6" } },
        ],
    }));
    insta::assert_debug_snapshot!(ObjectReferences::of(&pod));
}
