//! Pods with `hostPID`, which may inspect processes of their own user namespace. Some of Coracle's processes are in it too.

use e2e::{Cluster, Lab, WAITS, looking, pod, runs};
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
find() { ps -o pid,args | awk -v what="$1" '$0 ~ what { print $1; exit }'; }
works test -d /proc/$(find "[t]elling-$(hostname)")/root/bin
other=$(find '[s]leep 42001')
works test -n "$other" -a -d /proc/$other
fails test -d /proc/$other/root/bin
touch /v/done
"#;

fn spy(name: &str, security: Value) -> Value {
    let mounts = json!([{"name": "v", "mountPath": "/v"}]);
    let spying = json!({"securityContext": security, "volumeMounts": mounts});
    let telling = json!({"volumeMounts": mounts});
    let more = json!({"hostPID": true, "volumes": [{"name": "v", "emptyDir": {}}]});
    let wait = format!(": telling-{name}; until test -e /v/done; do sleep 0.1; done");
    let containers = [
        looking("main", spying, SPY),
        runs("telling", &wait, telling),
    ];
    pod(name, more, &containers)
}

#[test]
fn host_pid_pods_cannot_reach_the_users_home() {
    spies_see_nothing("CORACLE_ROOTFS=overlay");
}

/// The processes of fuse-overlayfs can't be made non-dumpable.
#[test]
fn host_pid_pods_cannot_reach_home_through_fuse_overlayfs() {
    spies_see_nothing("CORACLE_ROOTFS=fuse-overlayfs");
}

#[track_caller]
fn spies_see_nothing(setting: &str) {
    let lab = Lab::ready();
    lab.load_busybox();
    let words = ["env", setting, "srun", "-N1", "coracle", "run"];
    let mut cluster = Cluster::start_as(&lab, "user1", &words);
    let other = runs("main", "exec sleep 42001", json!({}));
    cluster.create_running(&[
        pod("other", json!({}), &[other]),
        spy("privileged", json!({"privileged": true})),
        spy("tracing", json!({"capabilities": {"add": ["SYS_PTRACE"]}})),
    ]);
    for number in 0..4 {
        let name = format!("beside-{number}");
        let beside = pod(&name, json!({}), &[runs("main", WAITS, json!({}))]);
        cluster.create_running(&[beside]);
    }
    for name in ["privileged", "tracing"] {
        cluster.ask(&format!(
            "kubectl exec {name} --container=telling -- touch /v/end"
        ));
    }
    cluster.find_all_right(&["privileged", "tracing"]);
    cluster.exit(0);
    lab.nothing_left();
}
