//! Malicious and mistaken volumes: each is rejected with an event at its own pod or is harmless, and no other pod is affected.

use e2e::{
    Lab, TestCluster, checking_container, checking_pod, container_status, merged, pod, wait_until,
};
use serde_json::{Value, json};

fn object(kind: &str, name: &str, more: Value) -> Value {
    let own = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}});
    merged(own, more)
}

/// A pod that mounts one volume at `/v`.
fn mounting(name: &str, source: Value, more: Value, script: &str) -> Value {
    let spec = json!({"volumes": [merged(json!({"name": "v"}), source)]});
    let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    checking_pod(name, merged(spec, more), mounts, script)
}

/// A PersistentVolume, and a claim of the same name that is bound to it.
fn persistent(name: &str, annotations: Value, source: Value) -> [Value; 2] {
    let size = json!({"storage": "1Mi"});
    let spec = json!({"capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": ""});
    let mode = source.get("volumeMode").cloned();
    let metadata = json!({"name": name, "annotations": annotations});
    let claim = json!({"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name,
        "resources": {"requests": size}, "volumeMode": mode.unwrap_or(json!("Filesystem"))});
    [
        object(
            "PersistentVolume",
            name,
            json!({"metadata": metadata, "spec": merged(spec, source)}),
        ),
        object("PersistentVolumeClaim", name, json!({"spec": claim})),
    ]
}

fn claimed(name: &str) -> Value {
    json!({"persistentVolumeClaim": {"claimName": name}})
}

fn affinity(node: &str) -> Value {
    json!({"required": {"nodeSelectorTerms": [{"matchExpressions":
        [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]}})
}

const MOUNTED_AT: &str = "coracle.dev/mounted-at";
const HOME: &str = "/home/user1/odd";

/// PersistentVolumes that must be rejected: name, annotations, source, and text of the event.
fn rejected_volumes() -> Vec<(&'static str, Value, Value, &'static str)> {
    let nfs = |path: &str| json!({"nfs": {"server": "nas", "path": path}});
    let local = |path: String| json!({"local": {"path": path}, "nodeAffinity": affinity("node1")});
    vec![
        (
            "nfs-elsewhere",
            json!({}),
            nfs("/export/x"),
            "nfs nas:/export/x is not mounted on this node",
        ),
        (
            "nfs-up",
            json!({}),
            nfs("/export/../../etc"),
            "invalid path: /export/../../etc",
        ),
        (
            "nfs-mounted-at-up",
            json!({MOUNTED_AT: format!("{HOME}/../odd")}),
            nfs("/export"),
            "invalid path: /home/user1/odd/../odd",
        ),
        (
            "nfs-relative",
            json!({MOUNTED_AT: "etc"}),
            nfs("/export"),
            "invalid path: etc",
        ),
        (
            "nfs-none",
            json!({MOUNTED_AT: format!("{HOME}/none")}),
            nfs("/export"),
            "/home/user1/odd/none is not a directory",
        ),
        (
            "local-none",
            json!({}),
            local(format!("{HOME}/none")),
            "path \"/home/user1/odd/none\" does not exist on this node",
        ),
        (
            "local-file",
            json!({}),
            local(format!("{HOME}/file")),
            "/home/user1/odd/file is not a directory",
        ),
        (
            "host-none",
            json!({}),
            json!({"hostPath": {"path": format!("{HOME}/none"), "type": "Directory"}}),
            "/home/user1/odd/none is not a directory",
        ),
        (
            "loop",
            json!({}),
            json!({"hostPath": {"path": format!("{HOME}/loop"), "type": "Directory"}}),
            "/home/user1/odd/loop is not a directory, unable to determine its type",
        ),
        (
            "csi",
            json!({}),
            json!({"csi": {"driver": "some.example", "volumeHandle": "h"}}),
            "Coracle does not support the CSI driver some.example; it supports hostPath, local and nfs",
        ),
    ]
}

#[test]
fn persistent_volumes_are_mounted_or_rejected_by_source() {
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.sh("mkdir -p odd/disk odd/nas && ln -s disk odd/link && ln -s loop odd/loop && echo mine > odd/file && chmod 755 odd")
        .run()
        .succeeded();
    // This kernel has no NFS. A mount with that source is enough, as the site's administrators would make it.
    let mount = "mount -n -t tmpfs -o size=1m,mode=1777 nas:/export /home/user1/odd/nas";
    lab.root("node1", mount).succeeded();
    let mut cluster = TestCluster::start(&lab);
    let mounted_at = json!({MOUNTED_AT: format!("{HOME}/nas")});
    let nfs =
        json!({"nfs": {"server": "nas", "path": "/export"}, "nodeAffinity": affinity("node1")});
    let read_only = json!({"nfs": {"server": "nas", "path": "/export", "readOnly": true}, "nodeAffinity": affinity("node1")});
    let disk =
        json!({"local": {"path": format!("{HOME}/link")}, "nodeAffinity": affinity("node2")});
    // Forged: these volumes claim to be the provisioner's, so that it would delete their directories.
    let forged =
        |by: &str| json!({"pv.kubernetes.io/provisioned-by": by, "coracle.dev/node": "node1"});
    let precious = json!({"persistentVolumeReclaimPolicy": "Delete", "hostPath": {"path": HOME}});
    let local = json!({"persistentVolumeReclaimPolicy": "Delete", "local": {"path": HOME}, "nodeAffinity": affinity("node1")});
    let block = json!({"local": {"path": "/dev/loop0"}, "nodeAffinity": affinity("node1"), "volumeMode": "Block"});
    let mut objects = [
        persistent("nfs", mounted_at.clone(), nfs),
        persistent("nfs-read-only", mounted_at, read_only),
        persistent("disk", json!({}), disk),
        persistent("forged", forged("coracle.dev/shared"), precious),
        persistent("forged-local", forged("coracle.dev/local"), local),
        persistent("block", json!({}), block),
    ]
    .concat();
    let group = json!({"securityContext": {"fsGroup": 3000}});
    let device = json!({"volumeDevices": [{"name": "v", "devicePath": "/dev/v"}]});
    objects.extend([
        mounting("nfs", claimed("nfs"), json!({}), "works sh -c 'echo fed > /v/file'\nis type tmpfs \"$(awk '$2 == \"/v\" { print $3 }' /proc/self/mounts)\""),
        mounting("disk", claimed("disk"), group, "works touch /v/x\nis group '3000 3000' \"$(echo $(stat -c %g /v /v/x))\""),
        checking_pod("block", json!({"volumes": [merged(json!({"name": "v"}), claimed("block"))]}), device, "true"),
    ]);
    for (name, annotations, source, _) in rejected_volumes() {
        objects.extend(persistent(name, annotations, source));
        // On a node without that mount, so that the messages do not vary.
        let here = json!({"nodeSelector": {"kubernetes.io/hostname": "node1"}});
        objects.push(mounting(name, claimed(name), here, "true"));
    }
    cluster.create_objects(&objects);
    cluster.assert_checks_pass(&["nfs", "disk"]);
    cluster.create_objects(&[mounting(
        "nfs-read-only",
        claimed("nfs-read-only"),
        json!({}),
        "is file fed \"$(cat /v/file)\"\nfails touch /v/x",
    )]);
    cluster.assert_checks_pass(&["nfs-read-only"]);
    // The pod is scheduled to the node of its volume, whose path is a link to the data.
    assert_eq!(cluster.pod("disk")["spec"]["nodeName"], "node2");
    lab.sh("ls odd/disk").run().stdout_is("x");
    for (name, _, _, expected) in rejected_volumes() {
        cluster.wait_for_event(name, expected);
        assert_eq!(cluster.pod(name)["status"]["phase"], "Pending", "{name}");
    }
    cluster.wait_for_event(
        "block",
        "has volumeMode Block, which Coracle does not support",
    );

    cluster.shell("kubectl delete pvc forged forged-local --wait --timeout=50s");
    cluster.wait_for_event("forged", "VolumeFailedDelete /home/user1/odd is not in ");
    wait_until(30, "the forged local volume is deleted", || {
        cluster
            .shell("kubectl get pv forged-local --ignore-not-found")
            .is_empty()
    });
    lab.sh("cat odd/file").run().stdout_is("mine");
    cluster.exit(0);
    lab.sh("cat odd/file").run().stdout_is("mine");
    lab.root("node1", "umount -n /home/user1/odd/nas")
        .succeeded();
    lab.remove("odd");
    lab.assert_nothing_left();
}

/// The first run replaces the subPath directory, which the second run mounts, by a link.
fn swapped() -> Value {
    let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/sub", "subPath": "dir"}]});
    let script = "test ! -L /v/dir && rmdir /v/dir && ln -s /etc /v/dir && exit 1; ls /sub";
    checking_pod(
        "swapped",
        json!({"restartPolicy": "OnFailure", "volumes": [{"name": "v", "emptyDir": {}}]}),
        mounts,
        script,
    )
}

/// A subPathExpr that leads out of its volume, or nowhere.
fn expanded(name: &str, value: &str) -> Value {
    let more = json!({"env": [{"name": "WHERE", "value": value}],
        "volumeMounts": [{"name": "v", "mountPath": "/v", "subPathExpr": "$(WHERE)"}]});
    let own = checking_container("main", more, "ls /v");
    pod(
        name,
        json!({"volumes": [{"name": "v", "emptyDir": {}}]}),
        &[own],
    )
}

#[test]
fn large_and_hostile_volume_content_is_harmless() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    // As large as the API allows, and binary; and many small ones.
    let sums = cluster.shell(
        "mkdir odd && cd odd && for i in 1 2 3 4 5 6; do head -c 1000000 /dev/urandom > big && kubectl create configmap big$i --from-file=big > /dev/null && md5sum < big; done; rm -r ~/odd",
    );
    let sums: String = sums
        .split_whitespace()
        .filter(|field| *field != "-")
        .collect();
    let many: serde_json::Map<String, Value> = (0..2000)
        .map(|i| (format!("key-{i}.txt"), json!(i.to_string())))
        .collect();
    let parts: Vec<Value> = (1..=6)
        .map(|i| json!({"configMap": {"name": format!("big{i}"), "items": [{"key": "big", "path": format!("{i}/big")}]}}))
        .collect();
    let odd = "line\nnew \"quoted\" \\ back\tünï";
    let described = json!({"downwardAPI": {"items": [
        {"path": "all", "fieldRef": {"fieldPath": "metadata.annotations"}},
        {"path": "odd", "fieldRef": {"fieldPath": "metadata.annotations['odd']"}}]}});
    let mut annotated = mounting(
        "annotated",
        described,
        json!({}),
        r#"is annotation "$(printf 'line\nnew "quoted" \\ back\tünï')" "$(cat /v/odd)"
is annotations 1 "$(grep -c '^odd="line\\nnew \\"quoted\\" \\\\ back\\tünï"$' /v/all)"
is variable "$(printf 'a\nb')" "$ODD""#,
    );
    annotated["metadata"]["annotations"] = json!({"odd": odd});
    annotated["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "lines"}}]);
    let clash = json!({"configMap": {"name": "lines", "items": [{"key": "ODD", "path": "a"}, {"key": "ODD", "path": "a/b"}]}});
    cluster.create_objects(&[
        object("ConfigMap", "many", json!({"data": many})),
        object("ConfigMap", "lines", json!({"data": {"ODD": "a\nb"}})),
        mounting(
            "big",
            json!({"projected": {"sources": parts}}),
            json!({}),
            &format!("is sums {sums} \"$(for i in 1 2 3 4 5 6; do md5sum < /v/$i/big; done | tr -dc 0-9a-f)\""),
        ),
        mounting(
            "many",
            json!({"configMap": {"name": "many"}}),
            json!({}),
            "is count 2000 \"$(ls /v | wc -l)\"\nis last 1999 \"$(cat /v/key-1999.txt)\"",
        ),
        annotated,
        mounting("clash", clash, json!({}), "true"),
        swapped(),
        expanded("up", "../../.."),
        expanded("root", "/etc"),
        expanded("within", "a/b"),
    ]);
    cluster.assert_checks_pass(&["big", "many", "annotated", "within"]);
    cluster.wait_for_event("clash", "MountVolume.SetUp failed for volume \"v\" : ");
    for (name, expected) in [
        ("swapped", "subPath \"dir\" is not within its volume"),
        ("up", "../../.. leaves the volume"),
        ("root", "/etc leaves the volume"),
    ] {
        let rejected = cluster.pod_until(name, "rejected", |pod| {
            let state = &container_status(pod, "main")["state"];
            state["waiting"]["message"]
                .as_str()
                .is_some_and(|message| message.contains(expected))
                || state["terminated"]["message"]
                    .as_str()
                    .is_some_and(|message| message.contains(expected))
        });
        assert_ne!(rejected["status"]["phase"], "Succeeded", "{name}");
        let (_, log) = cluster.try_shell(&format!("kubectl logs {name}"));
        assert!(!log.contains("passwd"), "{name} can read /etc: {log}");
    }

    // Objects that the API server itself rejects.
    for (description, object, expected) in rejected_by_the_api() {
        let text = format!("kubectl create --validate=ignore --filename=- <<'END'\n{object}\nEND");
        let (code, output) = cluster.try_shell(&text);
        assert_ne!(code, 0, "{description}: {output}");
        assert!(output.contains(expected), "{description}: {output}");
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

fn rejected_by_the_api() -> Vec<(&'static str, Value, &'static str)> {
    let mount = |more: Value| {
        let own = json!({"name": "v", "mountPath": "/v"});
        let main = checking_container("main", json!({"volumeMounts": [merged(own, more)]}), "true");
        pod(
            "bad",
            json!({"volumes": [{"name": "v", "emptyDir": {}}]}),
            &[main],
        )
    };
    let key = |path: &str| {
        let items = json!([{"key": "a", "path": path}]);
        mounting(
            "bad",
            json!({"configMap": {"name": "c", "items": items}}),
            json!({}),
            "true",
        )
    };
    let host = |path: &str| {
        mounting(
            "bad",
            json!({"hostPath": {"path": path}}),
            json!({}),
            "true",
        )
    };
    vec![
        (
            "a name with a newline",
            object("ConfigMap", "a\nb", json!({})),
            "Invalid value",
        ),
        (
            "a key with a newline",
            object("ConfigMap", "a", json!({"data": {"a\nb": "x"}})),
            "Invalid value",
        ),
        (
            "a subPath that goes up",
            mount(json!({"subPath": "a/../../b"})),
            "must not contain '..'",
        ),
        (
            "a subPath from the root",
            mount(json!({"subPath": "/etc"})),
            "must be a relative path",
        ),
        ("an item that goes up", key("../x"), "must not contain '..'"),
        (
            "an item that starts so",
            key("..data"),
            "must not start with '..'",
        ),
        (
            "a path that goes up",
            host("/tmp/../etc"),
            "must not contain '..'",
        ),
    ]
}
