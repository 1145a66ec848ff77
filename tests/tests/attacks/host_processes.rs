//! Pods that see the processes of the host, and may look into those of their own user namespace: ours are in it too.

use e2e::{Cluster, Lab, WAITS, looking, pod, runs};
use serde_json::{Value, json};

/// Tells of every process through which it sees the user's home directory, for as long as pods start beside it, and at last of
/// those whose program it sees. Nothing is started meanwhile, so that it looks often. It does see the other container of its own
/// pod, but no other pod's.
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
fn the_users_home_is_not_behind_any_process() {
    spies_see_nothing("CORACLE_ROOTFS=overlay");
}

/// Its processes can't hide.
#[test]
fn the_users_home_is_not_behind_fuse_overlayfs() {
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
