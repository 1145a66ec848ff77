//! A kubelet and the sandboxes of its pods on two hosts, connected over TLS, with nothing else shared.

use e2e::{BUSYBOX, Lab, TestCluster, container_status, wait_until};
use serde_json::json;

/// The files in the user's home directory.
const FILES: [&str; 5] = [
    "remote-kubelet",
    "remote-kubelet.state",
    "remote.out",
    "remote.2.out",
    "remote.code",
];

#[test]
fn pod_runs_on_another_host_than_its_kubelet() {
    let lab = Lab::acquire();
    lab.load_busybox();
    // May be left by a failed test.
    for name in FILES {
        lab.remove(name);
    }
    lab.install(env!("CARGO_BIN_EXE_remote-kubelet"), "remote-kubelet");
    // A small disk for the files of pods, which a pod can fill.
    let small_disk = "mount --no-mtab -t tmpfs -o size=512M,mode=1777 small /tmp";
    lab.root("node2", small_disk).succeeded();

    let mut cluster = TestCluster::start_as(&lab, "user1", &["coracle", "run", "-N2", "-c2"]);
    cluster.shell("(~/remote-kubelet remote node2 > ~/remote.out 2>&1; echo $? > ~/remote.code) &");
    let pod = |name: &str, script: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
            "spec": {
                "nodeName": "remote", "restartPolicy": "Never", "terminationGracePeriodSeconds": 2,
                "containers": [{ "name": "c", "image": BUSYBOX, "command": ["sh", "-c", script] }],
            },
        })
    };
    let mut writer = pod(
        "writer",
        "dd if=/dev/zero of=/v/fill bs=1048576 count=490; sleep 10000",
    );
    writer["spec"]["volumes"] = json!([{ "name": "v", "emptyDir": {} }]);
    writer["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    cluster.create_objects(&[
        pod(
            "serving",
            "trap 'exit 0' TERM; echo started; while true; do sleep 0.1; done",
        ),
        pod("failing", "exit 7"),
        writer,
    ]);
    let serving = cluster.wait_for_phase("serving", "Running");
    let node2 = lab.root("node2", "hostname -i").stdout;
    assert_eq!(serving["status"]["hostIP"], node2.trim(), "{serving}");
    assert!(serving["status"]["startTime"].is_string());
    let failing = cluster.wait_for_phase("failing", "Failed");
    let end = &container_status(&failing, "c")["state"]["terminated"];
    assert_eq!(end["exitCode"], 7);

    // Logs and commands go over the same connection.
    let output = |cluster: &mut TestCluster| cluster.shell("cat ~/remote.out");
    wait_until(30, "output of the remote kubelet", || {
        let text = output(&mut cluster);
        text.contains("log: started") && text.contains("exec: by exec on serving")
    });

    // The step of a pod that has ended ends with its exit code.
    wait_until(30, "end of the step of the failed pod", || {
        output(&mut cluster).contains("step ended: exit status: 7")
    });

    // The sandbox reports that its machine is short of disk space, so the kubelet evicts the pod that uses it.
    let evicted = cluster.wait_for_phase("writer", "Failed");
    assert_eq!(evicted["status"]["reason"], "Evicted", "{evicted}");
    let message = evicted["status"]["message"].as_str().unwrap_or_default();
    let expected = "The node was low on resource: ephemeral-storage.";
    assert!(message.starts_with(expected), "{message}");
    cluster.shell("kubectl delete pod writer --wait");

    // The pod outlives its kubelet, and the next kubelet adopts it.
    let container = container_status(&serving, "c")["containerID"].clone();
    cluster.shell("pkill -KILL -x remote-kubelet; until [ -e ~/remote.code ]; do sleep 0.1; done; rm ~/remote.code");
    cluster
        .shell("(~/remote-kubelet remote node2 > ~/remote.2.out 2>&1; echo $? > ~/remote.code) &");
    let second = |cluster: &mut TestCluster| cluster.shell("cat ~/remote.2.out");
    wait_until(30, "adoption of the pod", || {
        let text = second(&mut cluster);
        text.contains("found: ") && text.contains("exec: by exec on serving")
    });
    let adopted = cluster.pod("serving");
    assert_eq!(container_status(&adopted, "c")["containerID"], container);
    assert_eq!(container_status(&adopted, "c")["restartCount"], 0);
    cluster.shell("kubectl delete pod failing --wait");

    // SIGTERM, as from Slurm at the time limit of a job, ends the pod within its grace period.
    lab.root(
        "node2",
        "kill -TERM $(pgrep -o -f '^[^ ]*coracle internal pod-job')",
    );
    let ended = cluster.wait_for_phase("serving", "Failed");
    assert_eq!(ended["status"]["reason"], "Terminated", "{ended}");
    let message = &ended["status"]["message"];
    assert_eq!(message, "Slurm ended the job of the pod", "{ended}");
    assert_eq!(
        container_status(&ended, "c")["state"]["terminated"]["exitCode"],
        0
    );
    wait_until(30, "end of the step", || {
        second(&mut cluster).contains("found step ended")
    });
    cluster.shell("kubectl delete pod serving --wait");
    cluster.shell("pkill -TERM -x remote-kubelet; until [ -e ~/remote.code ]; do sleep 0.1; done");
    assert_eq!(cluster.shell("cat ~/remote.code").trim(), "0");
    cluster.exit(0);
    lab.root("node2", "umount --no-mtab /tmp").succeeded();
    for name in FILES {
        lab.remove(name);
    }
    lab.assert_nothing_left();
}
