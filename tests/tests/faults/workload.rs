//! The pods that run while faults are injected. Each kind makes a loss or a duplicate visible.
//!
//! | Pods | Policy | Shows |
//! |---|---|---|
//! | `steady-NODE`, containers `a` and `b` | Always | a line per run in an emptyDir; numbered lines in the logs |
//! | `keeper-N`, of a StatefulSet | Always | a sequence in a local volume that continues after a restart, and an id that only an empty volume is given; serves HTTP |
//! | `ends-ROUND-NODE` | Never | its own exit code, after it exited during the fault |
//! | `work-ROUND-INDEX`, of an Indexed Job | Never | a record of each start and of each end, in the user's home directory |
//! | `pull-NUMBER-NODE`, if pulls are hit | Never | that its image was unpacked completely |
//! | `deleted-NUMBER-NODE`, if it is hit while it is deleted | Always | that no process of it is left |

use e2e::{Lab, MIRROR, Registry, TestCluster, pod, script_container};
use serde_json::{Value, json};

use crate::fault::{NODES, Target};

/// In the home directory of `user1`, so that records outlive the pods.
pub const DIR: &str = "faults";
/// The number of indexes of a round's Job.
pub const COMPLETIONS: usize = 3;
/// The maximum number of faults in a round.
const FAULTS: usize = 2;
/// The size of a layer that takes a while to pull.
const LAYER_MIB: usize = 24;

/// Records have eight bytes, so that a full disk never truncates one.
const STEADY: &str = r#"
until printf '%7d\n' 1 >> /data/NAME.runs; do sleep 0.2; done 2> /dev/null
trap exit TERM; i=0
while true; do i=$((i+1)); echo tick $i; sleep 0.5; done"#;

const KEEPER: &str = r#"
trap exit TERM; httpd -p 8080 -h /etc
until test -s /data/id; do cat /proc/sys/kernel/random/uuid > /data/id || sleep 0.2; done 2> /dev/null
n=$(cat /data/seq 2> /dev/null | wc -l)
while true; do n=$((n+1)); until printf '%7d\n' $n >> /data/seq; do sleep 0.2; done 2> /dev/null; sleep 0.5; done"#;

const ENDS: &str =
    "echo started; until test -e /out/go-ROUND; do sleep 0.2; done; echo exiting; exit CODE";

const DELETED: &str = "trap 'sleep 1; exit 0' TERM; while true; do sleep 0.1; done";

const WORK: &str = r#"
echo "$JOB_COMPLETION_INDEX $POD_UID start" >> /out/work-ROUND; sleep 1
echo "$JOB_COMPLETION_INDEX $POD_UID done" >> /out/work-ROUND"#;

impl Target {
    /// The last argument of the process that faults hit.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Steady => "mark-steady-a",
            Self::Keeper => "mark-keeper-c",
            Self::Ends => "mark-ends-c",
            Self::Work => "mark-work-c",
            Self::Deleted => "mark-deleted-c",
        }
    }
}

/// The exit code of the pods of a round that exit by themselves.
pub fn exit_code(round: usize) -> u64 {
    1 + round as u64 % 100
}

fn container(name: &str, script: &str, mark: &str, mounts: Value) -> Value {
    let command = json!(["sh", "-c", script.trim().replace("$(", "$$("), mark]);
    script_container(
        name,
        "",
        json!({"command": command, "volumeMounts": mounts}),
    )
}

fn record_volumes() -> Value {
    let path = format!("/home/user1/{DIR}");
    json!([{"name": "out", "hostPath": {"path": path}}])
}

/// Tolerations that keep pods on a node that is NotReady for a while.
fn tolerations() -> Value {
    let tolerates = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute"});
    json!([
        tolerates("node.kubernetes.io/not-ready"),
        tolerates("node.kubernetes.io/unreachable")
    ])
}

/// `steady-NODE`.
pub fn steady_pod(node: &str) -> Value {
    let one = |name: &str| {
        let mounts = json!([{"name": "data", "mountPath": "/data"}]);
        let script = STEADY.replace("NAME", name);
        container(name, &script, &format!("mark-steady-{name}"), mounts)
    };
    let spec = json!({"nodeName": node, "restartPolicy": "Always", "tolerations": tolerations(),
        "volumes": [{"name": "data", "emptyDir": {}}]});
    pod(&format!("steady-{node}"), spec, &[one("a"), one("b")])
}

/// `keeper-N`, one on each node by anti-affinity.
fn keepers() -> Value {
    let labels = json!({"app": "keeper"});
    let mounts = json!([{"name": "data", "mountPath": "/data"}]);
    let anti_affinity = json!([{"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}]);
    let spec = json!({
        "terminationGracePeriodSeconds": 1,
        "tolerations": tolerations(),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": anti_affinity}},
        "containers": [container("c", KEEPER, Target::Keeper.mark(), mounts)],
    });
    let claim = json!({"accessModes": ["ReadWriteOnce"], "storageClassName": "local",
        "resources": {"requests": {"storage": "1Mi"}}});
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "keeper"}, "spec": {
        "replicas": NODES.len(), "serviceName": "keeper", "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }})
}

/// `ends-ROUND-NODE`.
fn exiting_pod(round: usize, node: &str) -> Value {
    let script = ENDS
        .replace("ROUND", &round.to_string())
        .replace("CODE", &exit_code(round).to_string());
    let mounts = json!([{"name": "out", "mountPath": "/out"}]);
    let spec = json!({"nodeName": node, "tolerations": tolerations(), "volumes": record_volumes()});
    pod(
        &format!("ends-{round}-{node}"),
        spec,
        &[container("c", &script, Target::Ends.mark(), mounts)],
    )
}

/// The Job whose pods are `work-ROUND-INDEX`.
fn job(round: usize) -> Value {
    let mounts = json!([{"name": "out", "mountPath": "/out"}]);
    let uid =
        json!([{"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]);
    let mut main = container(
        "c",
        &WORK.replace("ROUND", &round.to_string()),
        Target::Work.mark(),
        mounts,
    );
    main["env"] = uid;
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "tolerations": tolerations(),
        "volumes": record_volumes(), "containers": [main]});
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": format!("work-{round}")}, "spec": {
        "completions": COMPLETIONS, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 20,
        "template": {"spec": spec},
    }})
}

pub fn deleted_name(number: usize, node: &str) -> String {
    format!("deleted-{number}-{node}")
}

/// `deleted-NUMBER-NODE`, for the fault of that number.
pub fn deleted_pod(number: usize, node: &str) -> Value {
    let spec = json!({"nodeName": node, "restartPolicy": "Always", "terminationGracePeriodSeconds": 20,
        "tolerations": tolerations()});
    let main = container("c", DELETED, Target::Deleted.mark(), json!([]));
    pod(&deleted_name(number, node), spec, &[main])
}

pub fn pull_name(number: usize, node: &str) -> String {
    format!("pull-{number}-{node}")
}

/// `pull-NUMBER-NODE`, whose image has to be pulled, for the fault of that number.
pub fn pulling_pod(number: usize, node: &str) -> Value {
    let script = format!("test $(wc -c < /heavy) = {}", LAYER_MIB << 20);
    let main = json!({"name": "c", "image": pulled_image(number), "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script.replace("$(", "$$(")]});
    pod(
        &pull_name(number, node),
        json!({"nodeName": node, "tolerations": tolerations()}),
        &[main],
    )
}

/// The image that is pulled for the fault of that number.
fn pulled_image(number: usize) -> String {
    format!("{MIRROR}/heavy-{number}:1")
}

/// Removes that image from the store, so that it has to be downloaded again.
pub fn forget_image(lab: &Lab, number: usize) {
    // Ignore errors: the image may not be in the store.
    lab.sh(&format!("coracle image rm {}", pulled_image(number)))
        .run();
}

/// Loads the images of all pods into the store, and pushes those that have to be pulled to a registry.
pub fn load_images(lab: &Lab) -> Registry<'_> {
    lab.load_busybox();
    let mirror = lab.start_mirror();
    lab.write_registries_config(&format!(
        "[registry.\"{MIRROR}\"]\nca = \"/home/user1/mirror/ca.pem\"\n"
    ));
    let layer = format!("head -c {LAYER_MIB}M /dev/urandom > heavy; tar --create heavy");
    for number in 0..FAULTS {
        forget_image(lab, number);
        let name = format!("heavy-{number}");
        let pushed = mirror.push(&name, json!({"Env": ["PATH=/bin"]}), &layer);
        assert_eq!(pushed, pulled_image(number));
    }
    mirror
}

/// Starts the pods that run during all rounds.
#[track_caller]
pub fn start(lab: &Lab, cluster: &mut TestCluster) {
    lab.remove(DIR);
    lab.sh(&format!("mkdir {DIR}")).run().succeeded();
    let mut objects: Vec<Value> = NODES.iter().map(|node| steady_pod(node)).collect();
    objects.push(keepers());
    cluster.create_objects(&objects);
    for node in NODES {
        cluster.wait_for(&format!("steady-{node}"), "condition=Ready");
    }
    cluster.shell("kubectl rollout status statefulset/keeper --timeout=50s");
}

/// Starts the pods of a round. Does not wait for those of the Job.
pub fn start_round(cluster: &mut TestCluster, round: usize) {
    let objects: Vec<Value> = NODES.iter().map(|node| exiting_pod(round, node)).collect();
    cluster.create_objects(&objects);
    for node in NODES {
        cluster.wait_for(&format!("ends-{round}-{node}"), "condition=Ready");
    }
    cluster.create_objects(&[job(round)]);
}

/// The file whose existence makes the pods of a round exit, in the home directory of `user1`.
pub fn exit_file(round: usize) -> String {
    format!("{DIR}/go-{round}")
}

/// Makes the pods of a round exit.
pub fn make_pods_exit(lab: &Lab, round: usize) {
    lab.sh(&format!("touch {}", exit_file(round)))
        .run()
        .succeeded();
}

/// Removes the pods and files of a round.
pub fn clean_up_round(lab: &Lab, cluster: &mut TestCluster, round: usize) {
    let mut pods: Vec<String> = NODES
        .map(|node| format!("pod/ends-{round}-{node}"))
        .to_vec();
    for number in 0..FAULTS {
        for node in NODES {
            pods.push(format!("pod/{}", pull_name(number, node)));
            pods.push(format!("pod/{}", deleted_name(number, node)));
        }
    }
    cluster.shell(&format!(
        "kubectl delete --ignore-not-found --timeout=50s {} job/work-{round}",
        pods.join(" ")
    ));
    lab.sh(&format!("rm -f {} {DIR}/work-{round}", exit_file(round)))
        .run()
        .succeeded();
}

/// Removes the files and images of the test from the user's home directory.
pub fn clean_up(lab: &Lab) {
    lab.remove(DIR);
    for number in 0..FAULTS {
        forget_image(lab, number);
    }
}
