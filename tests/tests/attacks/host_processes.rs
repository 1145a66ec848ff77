//! Pods with `hostPID`, which may inspect processes of their own user namespace. Some of Coracle's processes are in it too.

use e2e::{Lab, TestCluster, WAIT_FOR_SIGTERM, checking_container, pod, script_container};
use serde_json::{Value, json};

/// Reports every process whose root or working directory leads to the user's home directory, while other pods start. At the end it
/// reports processes of Coracle whose executable it can read. The loop starts no process, so that it polls often. It can inspect
/// the other container of its own pod, but no other pod's.
const SPY: &str = r#"
until test -e /v/end; do
  for p in /proc/[0-9]*; do
    if [ -d $p/root/home/user1 ] || [ -d $p/cwd/home/user1 ]; then
      read -r name < $p/comm; echo "sees through $p $name"
    fi
  done 2> /dev/null
done
for p in /proc/[0-9]*; do
  if readlink $p/exe | grep -q 'coracle\|memfd'; then echo "sees the program of $p: $(tr '\0' ' ' < $p/cmdline)"; fi
done 2> /dev/null
find() { ps -o pid,args | awk -v pattern="$1" '$0 ~ pattern { print $1; exit }'; }
works test -d /proc/$(find "[h]elper-$(hostname)")/root/bin
other=$(find '[s]leep 42001')
works test -n "$other" -a -d /proc/$other
fails test -d /proc/$other/root/bin
touch /v/done
"#;

fn spy(name: &str, security: Value) -> Value {
    let mounts = json!([{"name": "v", "mountPath": "/v"}]);
    let spying = json!({"securityContext": security, "volumeMounts": mounts});
    let helping = json!({"volumeMounts": mounts});
    let more = json!({"hostPID": true, "volumes": [{"name": "v", "emptyDir": {}}]});
    let wait = format!(": helper-{name}; until test -e /v/done; do sleep 0.1; done");
    let containers = [
        checking_container("main", spying, SPY),
        script_container("helper", &wait, helping),
    ];
    pod(name, more, &containers)
}

#[test]
fn host_pid_pods_cannot_reach_the_users_home() {
    assert_spies_see_nothing("CORACLE_ROOTFS=overlay");
}

/// The processes of fuse-overlayfs cannot be made non-dumpable.
#[test]
fn fuse_overlayfs_does_not_expose_the_users_home() {
    assert_spies_see_nothing("CORACLE_ROOTFS=fuse-overlayfs");
}

#[track_caller]
fn assert_spies_see_nothing(setting: &str) {
    let lab = Lab::acquire();
    lab.load_busybox();
    let args = ["env", setting, "srun", "-N1", "coracle", "run"];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    let other = script_container("main", "exec sleep 42001", json!({}));
    cluster.create_running(&[
        pod("other", json!({}), &[other]),
        spy("privileged", json!({"privileged": true})),
        spy("tracing", json!({"capabilities": {"add": ["SYS_PTRACE"]}})),
    ]);
    for number in 0..4 {
        let name = format!("beside-{number}");
        let beside = pod(
            &name,
            json!({}),
            &[script_container("main", WAIT_FOR_SIGTERM, json!({}))],
        );
        cluster.create_running(&[beside]);
    }
    for name in ["privileged", "tracing"] {
        cluster.shell(&format!(
            "kubectl exec {name} --container=helper -- touch /v/end"
        ));
    }
    cluster.assert_checks_pass(&["privileged", "tracing"]);
    cluster.exit(0);
    lab.assert_nothing_left();
}
