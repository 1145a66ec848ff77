use super::*;

fn new_claim(annotations: Value, spec: Value) -> PersistentVolumeClaim {
    let mut full_spec = json!({
        "accessModes": ["ReadWriteMany"],
        "resources": { "requests": { "storage": "1Gi" } },
        "storageClassName": "shared",
    });
    for (key, value) in spec.as_object().unwrap() {
        full_spec[key] = value.clone();
    }
    serde_json::from_value(json!({
        "metadata": {
            "name": "data", "namespace": "shop", "uid": "1-2-3", "resourceVersion": "7",
            "annotations": annotations,
        },
        "spec": full_spec,
    }))
    .unwrap()
}

fn shared_claim() -> PersistentVolumeClaim {
    new_claim(json!({ PROVISIONER: SHARED }), json!({}))
}

fn node(annotations: Value) -> Node {
    serde_json::from_value(json!({
        "metadata": {
            "name": "node1", "resourceVersion": "9",
            "labels": { "kubernetes.io/hostname": "node1.cluster" },
            "annotations": annotations,
        },
    }))
    .unwrap()
}

fn class(policy: &str) -> StorageClass {
    StorageClass {
        reclaim_policy: Some(policy.to_owned()),
        ..super::super::storage_classes()[0].clone()
    }
}

const SPACE: DiskSpace = DiskSpace {
    total: 10 << 30,
    available: 5 << 30,
};
const NAME: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn only_own_unbound_claims_are_provisioned() {
    let local = json!({ PROVISIONER: LOCAL });
    let local_on_node = json!({ PROVISIONER: LOCAL, SELECTED_NODE: "node1" });
    let shared = json!({ PROVISIONER: SHARED });
    let decisions = [
        decide_claim(&shared_claim()),
        decide_claim(&new_claim(json!({}), json!({}))),
        decide_claim(&new_claim(
            json!({ PROVISIONER: "other.example" }),
            json!({}),
        )),
        decide_claim(&new_claim(shared.clone(), json!({ "volumeName": "pv1" }))),
        decide_claim(&new_claim(local, json!({}))),
        decide_claim(&new_claim(local_on_node, json!({}))),
        decide_claim(&new_claim(shared.clone(), json!({ "volumeMode": "Block" }))),
        decide_claim(&new_claim(shared.clone(), json!({ "selector": {} }))),
        decide_claim(&new_claim(
            shared,
            json!({ "dataSource": { "kind": "PersistentVolumeClaim", "name": "a" } }),
        )),
    ];
    insta::assert_debug_snapshot!(decisions);
}

#[test]
fn claim_beyond_free_space_is_rejected() {
    assert_eq!(check_free_space(&shared_claim(), SPACE), Ok(()));
    let greedy = new_claim(
        json!({}),
        json!({ "resources": { "requests": { "storage": "6Gi" } } }),
    );
    insta::assert_snapshot!(check_free_space(&greedy, SPACE).unwrap_err());
}

#[test]
fn class_with_ineffective_settings_is_rejected() {
    let plain = class("Delete");
    assert_eq!(check_class(&plain), Ok(()));
    let mut fast = plain.clone();
    fast.parameters = Some([("speed".to_owned(), "high".to_owned())].into());
    let mut careful = plain;
    careful.mount_options = Some(vec!["noexec".to_owned()]);
    insta::assert_debug_snapshot!([check_class(&fast), check_class(&careful)]);
}

#[test]
fn claim_beyond_disk_of_node_is_rejected() {
    let mut small = node(json!({}));
    assert_eq!(check_node_disk(&shared_claim(), &small), Ok(()));
    small.status =
        serde_json::from_value(json!({ "capacity": { "ephemeral-storage": "1Gi" } })).unwrap();
    assert_eq!(check_node_disk(&shared_claim(), &small), Ok(()));
    small.status =
        serde_json::from_value(json!({ "capacity": { "ephemeral-storage": "1Mi" } })).unwrap();
    assert_eq!(
        check_node_disk(&shared_claim(), &small).unwrap_err(),
        "1073741824 bytes are requested, but the disk of node \"node1\" has 1048576"
    );
}

#[test]
fn volume_expands_for_its_own_claim_only() {
    let volume = shared_volume(
        &shared_claim(),
        &class("Delete"),
        Path::new("/v/abc"),
        SPACE,
    );
    let with_capacity = |capacity: &str| {
        let mut claim = shared_claim();
        claim.status =
            serde_json::from_value(json!({ "capacity": { "storage": capacity } })).unwrap();
        claim
    };
    assert_eq!(expansion(&shared_claim(), &volume), None, "not bound yet");
    assert_eq!(expansion(&with_capacity("1Gi"), &volume), None);
    assert_eq!(
        expansion(&with_capacity("2Gi"), &volume),
        None,
        "no shrinking"
    );
    let to = Quantity("1Gi".to_owned());
    let by = 512 << 20;
    assert_eq!(
        expansion(&with_capacity("512Mi"), &volume),
        Some(Expansion { by, to })
    );
    let mut another = with_capacity("512Mi");
    another.metadata.uid = Some("4".to_owned());
    assert_eq!(expansion(&another, &volume), None);
    let mut foreign = volume;
    foreign.metadata.annotations = None;
    assert_eq!(expansion(&with_capacity("512Mi"), &foreign), None);
}

#[test]
fn shared_and_local_volumes() {
    let shared = shared_volume(
        &shared_claim(),
        &class("Retain"),
        Path::new("/home/me/v/abc"),
        SPACE,
    );
    let scratch = node(json!({ SCRATCH_ANNOTATION: "/tmp/coracle-1/local" }));
    let local = local_volume(&shared_claim(), &class("Delete"), &scratch, NAME).unwrap();
    insta::assert_json_snapshot!([shared, local]);
    assert_eq!(
        local_volume(&shared_claim(), &class("Delete"), &node(json!({})), NAME).unwrap_err(),
        "node \"node1\" has no directory for local volumes"
    );
}

fn released(mut volume: PersistentVolume, phase: &str) -> PersistentVolume {
    volume.status = serde_json::from_value(json!({ "phase": phase })).unwrap();
    volume
}

#[test]
fn reclaim_policy_decides_on_removal() {
    let volume =
        |policy| shared_volume(&shared_claim(), &class(policy), Path::new("/v/abc"), SPACE);
    assert_eq!(
        removal_location(&released(volume("Delete"), "Released")),
        Some(VolumeLocation::Shared)
    );
    assert_eq!(removal_location(&released(volume("Delete"), "Bound")), None);
    assert_eq!(
        removal_location(&released(volume("Retain"), "Released")),
        None
    );
    let mut foreign = released(volume("Delete"), "Released");
    foreign.metadata.annotations = None;
    assert_eq!(removal_location(&foreign), None);
    assert!(is_deleted_with_claim(&volume("Delete")));
    assert!(!is_deleted_with_claim(&volume("Retain")));
}

#[test]
fn removal_is_requested_once_and_confirmed_by_annotation() {
    let with = |remove: &str| {
        node(json!({ SCRATCH_ANNOTATION: "/tmp/c/local", REMOVE_VOLUMES_ANNOTATION: remove }))
    };
    let mut volume = local_volume(&shared_claim(), &class("Delete"), &with(""), NAME).unwrap();
    let location = VolumeLocation::Local {
        node: "node1".to_owned(),
    };
    assert_eq!(
        removal_location(&released(volume.clone(), "Released")),
        Some(location)
    );

    insta::assert_debug_snapshot!(node_removal(&volume, &with(&"f".repeat(32))));
    let annotations = volume.metadata.annotations.as_mut().unwrap();
    annotations.insert(REMOVAL_REQUESTED.to_owned(), "true".to_owned());
    assert_eq!(node_removal(&volume, &with(NAME)), NodeRemoval::Pending);
    assert_eq!(node_removal(&volume, &with("")), NodeRemoval::Done);
    let restarted = node(json!({ SCRATCH_ANNOTATION: "/tmp/d/local" }));
    assert_eq!(node_removal(&volume, &restarted), NodeRemoval::Done);
}

#[test]
fn only_generated_names_are_removed() {
    let listed = format!("../x,{NAME},,a/b,{}", "g".repeat(32));
    assert_eq!(
        requested_removals(&node(json!({ REMOVE_VOLUMES_ANNOTATION: listed }))),
        [NAME]
    );
    assert!(requested_removals(&node(json!({}))).is_empty());
}
