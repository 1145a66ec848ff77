//! What runs while faults are injected. Each part makes a loss or a second copy of itself visible.
//!
//! | Pods | Policy | Shows |
//! |---|---|---|
//! | `steady-NODE`, containers `a` and `b` | Always | a line per run in an emptyDir; numbered lines in the logs |
//! | `keeper-N`, of a StatefulSet | Always | a sequence in a local volume that goes on where it ended; serves HTTP |
//! | `ends-ROUND-NODE` | Never | its own exit code, after it was told to end amid the fault |
//! | `work-ROUND-INDEX`, of an Indexed Job | Never | a record of each start and of each end, in the user's home directory |

use e2e::{Cluster, Lab, pod, runs};
use serde_json::{Value, json};

use crate::plan::{NODES, Target};

/// In the home directory of `user1`, where records stay whatever becomes of pods.
pub const DIR: &str = "faults";
/// How many indexes the Job of a round has.
pub const COMPLETIONS: usize = 3;
/// An image whose layer takes a while to unpack.
pub const HEAVY: &str = "coracle.test/heavy:1";

/// Records have eight bytes, so that a full disk never takes half of one.
const STEADY: &str = r#"
until printf '%7d\n' 1 >> /data/NAME.runs; do sleep 0.2; done 2> /dev/null
trap exit TERM; i=0
while true; do i=$((i+1)); echo tick $i; sleep 0.5; done"#;

const KEEPER: &str = r#"
trap exit TERM; httpd -p 8080 -h /etc
n=$(cat /data/seq 2> /dev/null | wc -l)
while true; do n=$((n+1)); until printf '%7d\n' $n >> /data/seq; do sleep 0.2; done 2> /dev/null; sleep 0.5; done"#;

const ENDS: &str =
    "echo began; until test -e /out/go-ROUND; do sleep 0.2; done; echo gone; exit CODE";

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
        }
    }
}

/// The code with which the pods of a round end by themselves.
pub fn exit_code(round: usize) -> u64 {
    1 + round as u64 % 100
}

fn container(name: &str, script: &str, mark: &str, mounts: Value) -> Value {
    let command = json!(["sh", "-c", script.trim().replace("$(", "$$("), mark]);
    runs(
        name,
        "",
        json!({"command": command, "volumeMounts": mounts}),
    )
}

fn records() -> Value {
    let path = format!("/home/user1/{DIR}");
    json!([{"name": "out", "hostPath": {"path": path}}])
}

/// Pods never leave their node because it is not ready for a while, as with a long toleration of a user's own.
fn stays() -> Value {
    let tolerates = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute"});
    json!([
        tolerates("node.kubernetes.io/not-ready"),
        tolerates("node.kubernetes.io/unreachable")
    ])
}

/// `steady-NODE`.
pub fn steady(node: &str) -> Value {
    let one = |name: &str| {
        let mounts = json!([{"name": "data", "mountPath": "/data"}]);
        let script = STEADY.replace("NAME", name);
        container(name, &script, &format!("mark-steady-{name}"), mounts)
    };
    let spec = json!({"nodeName": node, "restartPolicy": "Always", "tolerations": stays(),
        "volumes": [{"name": "data", "emptyDir": {}}]});
    pod(&format!("steady-{node}"), spec, &[one("a"), one("b")])
}

/// One on each node, by its anti-affinity.
fn keepers() -> Value {
    let labels = json!({"app": "keeper"});
    let mounts = json!([{"name": "data", "mountPath": "/data"}]);
    let apart = json!([{"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}]);
    let spec = json!({
        "terminationGracePeriodSeconds": 1,
        "tolerations": stays(),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}},
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

fn ends(round: usize, node: &str) -> Value {
    let script = ENDS
        .replace("ROUND", &round.to_string())
        .replace("CODE", &exit_code(round).to_string());
    let mounts = json!([{"name": "out", "mountPath": "/out"}]);
    let spec = json!({"nodeName": node, "tolerations": stays(), "volumes": records()});
    pod(
        &format!("ends-{round}-{node}"),
        spec,
        &[container("c", &script, Target::Ends.mark(), mounts)],
    )
}

fn work(round: usize) -> Value {
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
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "tolerations": stays(),
        "volumes": records(), "containers": [main]});
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": format!("work-{round}")}, "spec": {
        "completions": COMPLETIONS, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 20,
        "template": {"spec": spec},
    }})
}

/// `pull-NODE`, whose image has to be unpacked.
pub fn pull(node: &str) -> Value {
    let main = json!({"name": "c", "image": HEAVY, "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", "test $(wc -c < /heavy) = 33554432".replace("$(", "$$(")]});
    pod(
        &format!("pull-{node}"),
        json!({"nodeName": node, "tolerations": stays()}),
        &[main],
    )
}

/// Puts the images of all pods into the store.
pub fn load_images(lab: &Lab) {
    lab.load_busybox();
    let layer = "yes heavy | head -c 32M > heavy; tar --create heavy";
    lab.load_image(HEAVY, json!({"Env": ["PATH=/bin"]}), layer);
}

/// Starts what runs all the time.
#[track_caller]
pub fn begin(lab: &Lab, cluster: &mut Cluster) {
    lab.remove(DIR);
    lab.sh(&format!("mkdir {DIR}")).run().succeeded();
    let mut objects: Vec<Value> = NODES.iter().map(|node| steady(node)).collect();
    objects.push(keepers());
    cluster.create_objects(&objects);
    for node in NODES {
        cluster.wait_for(&format!("steady-{node}"), "condition=Ready");
    }
    cluster.ask("kubectl rollout status statefulset/keeper --timeout=50s");
}

/// Starts what a round has of its own. Of the Job, nothing need run yet.
pub fn begin_round(cluster: &mut Cluster, round: usize) {
    let objects: Vec<Value> = NODES.iter().map(|node| ends(round, node)).collect();
    cluster.create_objects(&objects);
    for node in NODES {
        cluster.wait_for(&format!("ends-{round}-{node}"), "condition=Ready");
    }
    cluster.create_objects(&[work(round)]);
}

/// Tells the pods of a round to end.
pub fn tell_to_end(lab: &Lab, round: usize) {
    lab.sh(&format!("touch {DIR}/go-{round}")).run().succeeded();
}

/// Takes away what a round had of its own.
pub fn end_round(lab: &Lab, cluster: &mut Cluster, round: usize) {
    let ends = NODES
        .map(|node| format!("pod/ends-{round}-{node}"))
        .join(" ");
    let pulls = NODES.map(|node| format!("pod/pull-{node}")).join(" ");
    cluster.ask(&format!(
        "kubectl delete --ignore-not-found --timeout=50s {ends} {pulls} job/work-{round}"
    ));
    lab.sh(&format!("rm -f {DIR}/go-{round} {DIR}/work-{round}"))
        .run()
        .succeeded();
}

/// Takes away what is outside of the cluster.
pub fn end(lab: &Lab) {
    lab.remove(DIR);
    let remove = lab.sh(&format!("coracle image rm {HEAVY}"));
    remove.run().succeeded();
}
