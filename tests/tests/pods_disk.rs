//! What images take on a node: unpacked layers that nobody uses make room, and the Node says which images there are.

use std::time::Duration;

use e2e::{BUSYBOX, Cluster, EMPTY_LAYER, Lab, container, eventually, pod, wait_until};
use serde_json::{Value, json};

/// As if the disk were always full.
const FULL: &str = "CORACLE_IMAGE_GC=high=0,low=0,age=0,every=1s";

fn start(lab: &Lab) -> Cluster {
    Cluster::start_as(
        lab,
        "user1",
        &["env", FULL, "srun", "-N1", "coracle", "run"],
    )
}

fn layers(lab: &Lab) -> usize {
    let list = "find /tmp/coracle-*/layers -mindepth 1 -maxdepth 1 -name '[0-9a-f]*' | wc -l";
    let count = lab.root("node1", list).stdout;
    count.trim().parse().expect("a number")
}

fn saying(name: &str, image: &str, word: &str) -> Value {
    let main = json!({"name": "main", "image": image, "imagePullPolicy": "IfNotPresent", "command": ["echo", word]});
    pod(name, json!({}), &[main])
}

#[test]
fn layers_that_nobody_uses_make_room() {
    let lab = Lab::ready();
    lab.load_busybox();
    let config = json!({"Env": ["PATH=/bin"], "Cmd": ["sh"]});
    lab.load_image("coracle.test/other:1", config, EMPTY_LAYER);
    let mut cluster = start(&lab);
    let main = json!({"name": "main", "image": BUSYBOX, "command": ["sh", "-c",
        "trap exit TERM; until test -e /again; do sleep 0.1; ls /bin > /dev/null || exit 1; done"]});
    cluster.create_objects(&[
        pod("stays", json!({"restartPolicy": "Always"}), &[main]),
        saying("ends", "coracle.test/other:1", "once"),
    ]);
    cluster.wait_for("stays", "condition=Ready");
    cluster.in_phase("ends", "Succeeded");
    assert_eq!(layers(&lab), 3, "one of the one, two of the other");
    cluster.ask("kubectl delete pod ends");
    wait_until(15, "what nobody uses is gone", || layers(&lab) == 1);

    // What is gone comes back, and what is used was never away.
    cluster.create_objects(&[saying("comes", "coracle.test/other:1", "twice")]);
    cluster.in_phase("comes", "Succeeded");
    assert_eq!(cluster.logs("comes", "main"), "twice");
    let stays = cluster.pod("stays");
    assert_eq!(container(&stays, "main")["restartCount"], 0, "{stays:#}");
    cluster.ask("kubectl delete pod --all --grace-period=1");
    wait_until(15, "nothing is left", || layers(&lab) == 0);
    cluster.exit(0);
    lab.nothing_left();
}

#[test]
fn the_node_lists_its_images() {
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = start(&lab);
    let mut last = Value::Null;
    let listed = eventually(Duration::from_secs(40), || {
        last = cluster.json("get node node1")["status"]["images"].clone();
        let images = last.as_array()?.iter();
        let mut named = images.filter(|image| {
            let names = image["names"].as_array();
            names.is_some_and(|names| names.contains(&json!(BUSYBOX)))
        });
        named.next().cloned()
    });
    let busybox = listed.unwrap_or_else(|| panic!("{BUSYBOX} is not listed: {last:#}"));
    assert!(busybox["sizeBytes"].as_u64() > Some(100_000), "{busybox}");
    let names = busybox["names"].to_string();
    assert!(names.contains("coracle.test/busybox@sha256:"), "{names}");
    cluster.exit(0);
    lab.nothing_left();
}
