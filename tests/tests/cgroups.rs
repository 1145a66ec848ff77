//! Memory and CPU limits: by delegated cgroups v2, in a virtual machine (tests/qemu) because this machine may not have them, and by
//! the cgroups of the job.

use std::process::{Command, Stdio};

use e2e::{Lab, Role, TestCluster, container_status};

/// Boots the machine and checks its report. The test ends with the machine or at a time-out.
#[test]
fn delegated_cgroups_enforce_limits() {
    let run = concat!(env!("CARGO_MANIFEST_DIR"), "/qemu/run");
    let output = Command::new("timeout")
        .args(["170", run])
        .args([env!("CARGO_BIN_EXE_limits"), env!("CARGO_BIN_EXE_escape")])
        .stdin(Stdio::null())
        .output()
        .expect("a script can be started");
    let console = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let printed = |line: &str| console.lines().any(|found| found.starts_with(line));
    for check in [
        "container-memory-limit",
        "container-cgroup-view",
        "memory-limit-below-usage",
        "pod-memory-limit",
        "exit-reasons",
        "cpu-limit",
        "process-limit",
        "killed-sandbox",
        "cgroups-are-removed",
        "without-cgroups",
        "node-root-is-inaccessible",
        "cgroup-is-restored",
    ] {
        assert!(
            printed(&format!("ok {check}: ")),
            "{check}:\n{console}\n{errors}"
        );
    }
    assert!(printed("VERDICT ok"), "{console}\n{errors}");
    for line in [
        "agent: pods may have 300 processes, controllers cpu io memory pids",
        "agent: groups left: 0",
    ] {
        assert!(printed(line), "{line}:\n{console}\n{errors}");
    }
}

/// Like Slurm with ConstrainRAMSpace: a cgroup with a limit for all processes of the step.
const CONSTRAIN: &str = r#"
if test -d /sys/fs/cgroup/memory; then
  group=/sys/fs/cgroup/memory/coracle-e2e limit=memory.limit_in_bytes
else
  group=/sys/fs/cgroup/coracle-e2e limit=memory.max
  echo +memory > /sys/fs/cgroup/cgroup.subtree_control
fi
mkdir -p $group && echo 300M > $group/$limit && for pid in PIDS; do echo $pid > $group/cgroup.procs; done
"#;
const UNDO: &str =
    "rmdir /sys/fs/cgroup/memory/coracle-e2e /sys/fs/cgroup/coracle-e2e 2>/dev/null; true";

const PODS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: several}
spec:
  nodeName: node2
  restartPolicy: Never
  containers:
  - {name: sibling, image: IMAGE, command: [sleep, '41101']}
  - {name: says-so, image: IMAGE, command: [sh, -c, 'exit 137']}
---
apiVersion: v1
kind: Pod
metadata: {name: eater}
spec:
  nodeName: node2
  restartPolicy: Never
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'sleep 2; tail /dev/zero']}]
"#;

#[test]
fn oom_kill_by_job_limit_is_attributed_correctly() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    let agents = [Role::AgentGuard, Role::Agent].map(|role| lab.find("node2", role).pid);
    let pids = agents.map(|pid| pid.to_string()).join(" ");
    lab.root("node2", &CONSTRAIN.replace("PIDS", &pids))
        .succeeded();
    cluster.create(&lab, PODS);
    let end = |pod: &serde_json::Value, name: &str| {
        let state = &container_status(pod, name)["state"]["terminated"];
        format!("{} {}", state["reason"], state["exitCode"])
    };
    let eater = cluster.wait_for_phase("eater", "Failed");
    assert_eq!(end(&eater, "c"), "\"OOMKilled\" 137", "{eater:#}");
    let several = cluster.pod_until("several", "one container has terminated", |pod| {
        container_status(pod, "says-so")["state"]["terminated"].is_object()
    });
    assert_eq!(end(&several, "says-so"), "\"Error\" 137", "{several:#}");
    assert!(
        container_status(&several, "sibling")["state"]["running"].is_object(),
        "{several:#}"
    );
    // A container that is killed by a user was not OOM-killed: the kernel's last OOM kill was of another container, and too long
    // ago.
    cluster.shell("sleep 12");
    let (host, sibling) = lab.marked("sleep 41101").remove(0);
    lab.kill(&host, "KILL", &sibling);
    let several = cluster.wait_for_phase("several", "Failed");
    assert_eq!(end(&several, "sibling"), "\"Error\" 137", "{several:#}");
    cluster.exit(0);
    lab.root("node2", UNDO);
    lab.assert_nothing_left();
}
