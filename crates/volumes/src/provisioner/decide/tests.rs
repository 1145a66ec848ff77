use super::*;

fn new_claim(annotations: Value, spec: Value) -> PersistentVolumeClaim {
    let mut whole = json!({
        "accessModes": ["ReadWriteMany"],
        "resources": { "requests": { "storage": "1Gi" } },
        "storageClassName": "shared",
    });
    for (key, value) in spec.as_object().unwrap() {
        whole[key] = value.clone();
    }
    serde_json::from_value(json!({
        "metadata": {
            "name": "data", "namespace": "shop", "uid": "1-2-3", "resourceVersion": "7",
            "annotations": annotations,
        },
        "spec": whole,
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

const ROOM: Room = Room {
    total: 10 << 30,
    available: 5 << 30,
};
const NAME: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn claims_are_told_apart() {
    let local = json!({ PROVISIONER: LOCAL });
    let placed = json!({ PROVISIONER: LOCAL, SELECTED_NODE: "node1" });
    let ours = json!({ PROVISIONER: SHARED });
    let decided = [
        claim(&shared_claim()),
        claim(&new_claim(json!({}), json!({}))),
        claim(&new_claim(
            json!({ PROVISIONER: "other.example" }),
            json!({}),
        )),
        claim(&new_claim(ours.clone(), json!({ "volumeName": "pv1" }))),
        claim(&new_claim(local, json!({}))),
        claim(&new_claim(placed, json!({}))),
        claim(&new_claim(ours.clone(), json!({ "volumeMode": "Block" }))),
        claim(&new_claim(ours.clone(), json!({ "selector": {} }))),
        claim(&new_claim(
            ours,
            json!({ "dataSource": { "kind": "PersistentVolumeClaim", "name": "a" } }),
        )),
    ];
    insta::assert_debug_snapshot!(decided);
}

#[test]
fn a_claim_for_more_than_there_is_is_refused() {
    assert_eq!(check_room(&shared_claim(), ROOM), Ok(()));
    let greedy = new_claim(
        json!({}),
        json!({ "resources": { "requests": { "storage": "6Gi" } } }),
    );
    insta::assert_snapshot!(check_room(&greedy, ROOM).unwrap_err());
}

#[test]
fn a_class_that_asks_for_what_nobody_does_is_refused() {
    let plain = class("Delete");
    assert_eq!(check_class(&plain), Ok(()));
    let mut fast = plain.clone();
    fast.parameters = Some([("speed".to_owned(), "high".to_owned())].into());
    let mut careful = plain;
    careful.mount_options = Some(vec!["noexec".to_owned()]);
    insta::assert_debug_snapshot!([check_class(&fast), check_class(&careful)]);
}

#[test]
fn a_claim_for_more_than_a_node_has_is_refused() {
    let mut small = node(json!({}));
    assert_eq!(check_node_room(&shared_claim(), &small), Ok(()));
    small.status =
        serde_json::from_value(json!({ "capacity": { "ephemeral-storage": "1Gi" } })).unwrap();
    assert_eq!(check_node_room(&shared_claim(), &small), Ok(()));
    small.status =
        serde_json::from_value(json!({ "capacity": { "ephemeral-storage": "1Mi" } })).unwrap();
    assert_eq!(
        check_node_room(&shared_claim(), &small).unwrap_err(),
        "1073741824 bytes are requested, but the disk of node \"node1\" has 1048576"
    );
}

#[test]
fn a_volume_grows_when_its_own_claim_asks_for_more() {
    let volume = shared_volume(&shared_claim(), &class("Delete"), Path::new("/v/abc"), ROOM);
    let having = |capacity: &str| {
        let mut claim = shared_claim();
        claim.status =
            serde_json::from_value(json!({ "capacity": { "storage": capacity } })).unwrap();
        claim
    };
    assert_eq!(growth(&shared_claim(), &volume), None, "not bound yet");
    assert_eq!(growth(&having("1Gi"), &volume), None);
    assert_eq!(growth(&having("2Gi"), &volume), None, "nothing shrinks");
    let to = Quantity("1Gi".to_owned());
    let by = 512 << 20;
    assert_eq!(growth(&having("512Mi"), &volume), Some(Growth { by, to }));
    let mut another = having("512Mi");
    another.metadata.uid = Some("4".to_owned());
    assert_eq!(growth(&another, &volume), None);
    let mut foreign = volume;
    foreign.metadata.annotations = None;
    assert_eq!(growth(&having("512Mi"), &foreign), None);
}

#[test]
fn volumes_of_both_kinds() {
    let shared = shared_volume(
        &shared_claim(),
        &class("Retain"),
        Path::new("/home/me/v/abc"),
        ROOM,
    );
    let scratch = node(json!({ SCRATCH: "/tmp/coracle-1/local" }));
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
fn reclaim_policies_are_honoured() {
    let volume = |policy| shared_volume(&shared_claim(), &class(policy), Path::new("/v/abc"), ROOM);
    assert_eq!(
        removal(&released(volume("Delete"), "Released")),
        Some(Place::Shared)
    );
    assert_eq!(removal(&released(volume("Delete"), "Bound")), None);
    assert_eq!(removal(&released(volume("Retain"), "Released")), None);
    let mut foreign = released(volume("Delete"), "Released");
    foreign.metadata.annotations = None;
    assert_eq!(removal(&foreign), None);
    assert!(is_deleted_with_claim(&volume("Delete")));
    assert!(!is_deleted_with_claim(&volume("Retain")));
}

#[test]
fn a_node_is_asked_once_and_answers_by_taking_the_name_away() {
    let with = |remove: &str| node(json!({ SCRATCH: "/tmp/c/local", REMOVE: remove }));
    let mut volume = local_volume(&shared_claim(), &class("Delete"), &with(""), NAME).unwrap();
    let place = Place::Local {
        node: "node1".to_owned(),
    };
    assert_eq!(removal(&released(volume.clone(), "Released")), Some(place));

    insta::assert_debug_snapshot!(ask_node(&volume, &with(&"f".repeat(32))));
    let annotations = volume.metadata.annotations.as_mut().unwrap();
    annotations.insert(ASKED.to_owned(), "true".to_owned());
    assert_eq!(ask_node(&volume, &with(NAME)), Asking::Waiting);
    assert_eq!(ask_node(&volume, &with("")), Asking::Done);
    let reborn = node(json!({ SCRATCH: "/tmp/d/local" }));
    assert_eq!(ask_node(&volume, &reborn), Asking::Done);
}

#[test]
fn only_names_of_ours_are_removed() {
    let listed = format!("../x,{NAME},,a/b,{}", "g".repeat(32));
    assert_eq!(removals(&node(json!({ REMOVE: listed }))), [NAME]);
    assert!(removals(&node(json!({}))).is_empty());
}
