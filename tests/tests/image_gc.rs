//! Garbage collection of unpacked image layers, and the images in the Node's status.

use std::time::Duration;

use e2e::{
    BUSYBOX, EMPTY_LAYER, Lab, SmallDisk, TestCluster, container_status, eventually, pod,
    wait_until,
};
use serde_json::{Value, json};

/// Garbage collection as if the disk were always full.
const GC_ALWAYS: &str = "CORACLE_IMAGE_GC=high=0,low=0,age=0,every=1s";

/// Garbage collection that starts above 50 % usage of the disk and stops below 38 %.
const GC_ABOVE_HALF: &str = "CORACLE_IMAGE_GC=high=50,low=38,age=0,every=1s";

fn start(lab: &Lab, settings: &str) -> TestCluster {
    let args = ["env", settings, "srun", "-N1", "-wnode1", "coracle", "run"];
    TestCluster::start_as(lab, "user1", &args)
}

fn layers(lab: &Lab) -> usize {
    let list = "find /tmp/coracle-*/layers -mindepth 1 -maxdepth 1 -name '[0-9a-f]*' | wc -l";
    let count = lab.root("node1", list).stdout;
    count.trim().parse().expect("a number")
}

fn echo_pod(name: &str, image: &str, text: &str) -> Value {
    let main = json!({"name": "main", "image": image, "imagePullPolicy": "IfNotPresent", "command": ["echo", text]});
    pod(name, json!({}), &[main])
}

#[test]
fn unused_layers_are_removed() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let config = json!({"Env": ["PATH=/bin"], "Cmd": ["sh"]});
    lab.load_image("coracle.test/other:1", config, EMPTY_LAYER);
    let mut cluster = start(&lab, GC_ALWAYS);
    let main = json!({"name": "main", "image": BUSYBOX, "command": ["sh", "-c",
        "trap exit TERM; until test -e /again; do sleep 0.1; ls /bin > /dev/null || exit 1; done"]});
    cluster.create_objects(&[
        pod("stays", json!({"restartPolicy": "Always"}), &[main]),
        echo_pod("ends", "coracle.test/other:1", "once"),
    ]);
    cluster.wait_for("stays", "condition=Ready");
    cluster.wait_for_phase("ends", "Succeeded");
    // The layer of the running pod stays. The two layers of the other pod were removed when its process exited, although the pod
    // still exists.
    wait_until(15, "unused layers are removed", || layers(&lab) == 1);
    assert_eq!(cluster.logs("ends", "main"), "once");
    cluster.shell("kubectl delete pod ends");

    // Removed layers are unpacked again. Layers in use were never removed.
    cluster.create_objects(&[echo_pod("comes", "coracle.test/other:1", "twice")]);
    cluster.wait_for_phase("comes", "Succeeded");
    assert_eq!(cluster.logs("comes", "main"), "twice");
    let stays = cluster.pod("stays");
    assert_eq!(
        container_status(&stays, "main")["restartCount"],
        0,
        "{stays:#}"
    );
    cluster.shell("kubectl delete pod --all --grace-period=1");
    wait_until(15, "no layer is left", || layers(&lab) == 0);
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// Images with a layer of a tenth of the small disk.
const LARGE: [&str; 5] = ["a", "b", "c", "d", "e"];

fn large(name: &str) -> String {
    format!("coracle.test/large-{name}:1")
}

#[test]
fn node_lists_images_and_removes_least_recently_used() {
    let lab = Lab::acquire();
    lab.load_busybox();
    for name in LARGE {
        let config = json!({"Env": ["PATH=/bin"], "Cmd": ["sh"]});
        let layer = format!("yes {name} | head -c 10M > large-{name}; tar --create large-{name}");
        lab.load_image(&large(name), config, &layer);
    }
    let disk = SmallDisk::on_node1(&lab, "small", "/tmp", "size=100m,mode=1777");
    let mut cluster = start(&lab, GC_ABOVE_HALF);
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

    assert_two_layers_are_removed(&lab, &mut cluster);
    cluster.exit(0);
    drop(disk);
    let names = LARGE.map(large).join(" ");
    let remove = lab.sh(&format!("coracle image rm {names}"));
    remove.run().succeeded();
    lab.assert_nothing_left();
}

/// The large layers that are unpacked.
fn unpacked(lab: &Lab) -> String {
    let list =
        "cd /tmp/coracle-*/layers && ls -d */large-* | sed 's,.*large-,,' | sort | tr -d '\\n'";
    lab.root("node1", list).stdout
}

/// The fifth large layer exceeds the threshold. The two least recently used layers are removed, and no third one.
#[track_caller]
fn assert_two_layers_are_removed(lab: &Lab, cluster: &mut TestCluster) {
    let run = |cluster: &mut TestCluster, name: &str| {
        cluster.create_objects(&[echo_pod(name, &large(name), name)]);
        cluster.wait_for_phase(name, "Succeeded");
    };
    for name in ["a", "b", "c", "d", "a"] {
        run(cluster, name);
        cluster.shell(&format!("kubectl delete pod {name} --wait --timeout=50s"));
    }
    assert_eq!(unpacked(lab), "abcd", "{}", lab.root("node1", "df -k /tmp"));
    run(cluster, "e");
    let mut log = String::new();
    wait_until(30, "layers are removed", || {
        log = cluster.shell("kubectl get --raw '/api/v1/nodes/node1/proxy/logs/?query=kubelet'");
        log.contains(" layers removed")
    });
    let left = (unpacked(lab), log.matches(" layers removed").count());
    let df = lab.root("node1", "df -k /tmp; ls -a /tmp/coracle-*/layers");
    assert_eq!(left, ("ade".to_owned(), 1), "{df}\n{log}");
    assert!(log.contains("2 layers removed"), "{log}");
}
