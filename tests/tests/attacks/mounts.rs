//! Containers that write to files which the node mounts into them, evade disk accounting, or redirect mounts.

use e2e::{Lab, TestCluster, checking_pod, merged, pod};
use serde_json::{Value, json};

/// The pod's files below /etc are writable. Writing them must not use the space of the tmpfs with the secrets.
const FILL: &str = r#"
for file in hosts hostname resolv.conf; do works sh -c "head -c 16m /dev/zero >> /etc/$file"; done
[ $(df -k /secret | tail -n 1 | awk '{print $3}') -lt 1024 ] || df -k /secret
is secret kept "$(cat /secret/word)"
"#;

/// Writes beyond the pod's limit, where the kubelet might not measure usage.
const FILL_HOSTS: &str = "head -c 16m /dev/zero >> /etc/hosts; sleep 1000";
const FILL_DEEP: &str = "d=/v; for i in $(seq 700); do d=$d/d; done; mkdir -p $d; head -c 16m /dev/zero > $d/file; sleep 1000";

/// A volume at /dev with a forged `null`: a runtime that masks files of /proc with the container's /dev/null would mount the forged
/// one.
const LINK: &str = "ln -s /proc/sys/kernel/hostname /v/null";
const READ_MASKED: &str = r#"
for file in interrupts kcore keys timer_list; do
  if [ -e /proc/$file ]; then is $file "" "$(head -c 100 /proc/$file)"; fi
done
fails touch /proc/sys/kernel/hostname
"#;

fn volume(name: &str, source: Value) -> Value {
    let mut volume = source;
    volume["name"] = json!(name);
    json!({ "volumes": [volume] })
}

fn writer(script: &str, more: Value) -> Value {
    let own = json!({"name": "main", "image": e2e::BUSYBOX, "command": ["sh", "-c", script]});
    merged(own, more)
}

#[test]
fn disk_usage_is_measured_and_proc_stays_masked() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.shell("kubectl create secret generic secret --from-literal=word=kept");
    let at = |path: &str| json!({"volumeMounts": [{"name": "v", "mountPath": path}]});
    let limit = json!({"resources": {"limits": {"ephemeral-storage": "8Mi"}}});
    let link = merged(writer(LINK, at("/v")), json!({"name": "link"}));
    let mut masked = checking_pod(
        "masked",
        volume("v", json!({"emptyDir": {}})),
        at("/dev"),
        READ_MASKED,
    );
    masked["spec"]["initContainers"] = json!([link]);
    cluster.create_objects(&[
        checking_pod(
            "fills",
            volume("v", json!({"secret": {"secretName": "secret"}})),
            at("/secret"),
            FILL,
        ),
        masked,
        pod("hosts", json!({}), &[writer(FILL_HOSTS, limit)]),
        pod(
            "deep",
            volume("v", json!({"emptyDir": {"sizeLimit": "8Mi"}})),
            &[writer(FILL_DEEP, at("/v"))],
        ),
    ]);
    cluster.assert_checks_pass(&["fills", "masked"]);
    for (name, expected) in [
        ("hosts", "exceeds the total limit of containers 8Mi"),
        ("deep", "Usage of EmptyDir volume \"v\" exceeds the limit"),
    ] {
        let status = &cluster.wait_for_phase(name, "Failed")["status"];
        assert_eq!(status["reason"], "Evicted", "{status:#}");
        let message = status["message"].as_str().unwrap_or_default();
        assert!(message.contains(expected), "{message}");
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}
