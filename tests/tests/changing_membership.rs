//! Nodes join a running cluster and leave it.

use e2e::{BUSYBOX, Lab, Role, TestCluster, container_status, wait_until};
use serde_json::{Value, json};

/// Fields that do not change while a node is unaffected.
fn node_facts(cluster: &mut TestCluster, node: &str) -> [Value; 2] {
    let node = cluster.json(&format!("get node {node}"));
    [
        node["metadata"]["uid"].clone(),
        node["spec"]["podCIDR"].clone(),
    ]
}

fn pod_facts(cluster: &mut TestCluster, name: &str) -> [Value; 3] {
    let pod = cluster.pod(name);
    let status = container_status(&pod, "c");
    [
        status["containerID"].clone(),
        status["ready"].clone(),
        pod["status"]["podIP"].clone(),
    ]
}

fn pod(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 2,
            "containers": [{
                "name": "c", "image": BUSYBOX,
                "command": ["sh", "-c", "trap exit TERM; while true; do sleep 0.1; done"],
            }],
        },
    })
}

fn replica_set(name: &str, node: &str) -> Value {
    let mut template = pod(name, node);
    template["metadata"] = json!({ "labels": { "app": name } });
    let spec = &mut template["spec"];
    spec["nodeName"] = Value::Null;
    spec["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
    json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": { "name": name },
        "spec": {
            "selector": { "matchLabels": { "app": name } },
            "template": { "metadata": template["metadata"], "spec": template["spec"] },
        },
    })
}

#[test]
fn nodes_join_and_leave_a_running_cluster() {
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.install(env!("CARGO_BIN_EXE_changing-cluster"), "changing-cluster");
    let run = [
        "env",
        "MEMBERSHIP=/home/user1/membership",
        "CORACLE_KUBERNETES=/opt/coracle/lib/coracle/kubernetes",
        "salloc",
        "-wnode1,node2",
        "-c2",
        "srun",
        "--overlap",
        "-N1",
        "-n1",
        "-wnode1",
        "/home/user1/changing-cluster",
    ];
    let mut cluster = TestCluster::start_as(&lab, "user1", &run);
    let nodes = |cluster: &mut TestCluster| cluster.shell("kubectl get nodes -o name");
    let wait_for_nodes = |cluster: &mut TestCluster, expected: &str| {
        wait_until(60, expected, || nodes(cluster).trim() == expected);
    };
    assert_eq!(nodes(&mut cluster).trim(), "node/node1");
    cluster.create_objects(&[pod("first", "node1")]);
    cluster.wait_for("first", "condition=Ready");
    let node1 = node_facts(&mut cluster, "node1");
    let first = pod_facts(&mut cluster, "first");

    // A node that joins later runs pods, with addresses of its own range.
    cluster.shell("echo add node2 > $MEMBERSHIP");
    wait_for_nodes(&mut cluster, "node/node1\nnode/node2");
    cluster.shell("kubectl wait node/node2 --for=condition=Ready --timeout=60s");
    cluster.create_objects(&[pod("second", "node2")]);
    cluster.wait_for("second", "condition=Ready");
    let node2 = node_facts(&mut cluster, "node2");
    assert_ne!(node1[1], node2[1]);

    // A node that leaves ends its pods and deletes its Node. The other one is not affected.
    cluster.shell("echo remove node2 > $MEMBERSHIP");
    wait_for_nodes(&mut cluster, "node/node1");
    wait_until(30, "node2 has no process of the cluster", || {
        let processes = lab.processes("node2");
        !processes.iter().any(|process| process.user == "user1")
    });
    assert_eq!(node_facts(&mut cluster, "node1"), node1);
    assert_eq!(pod_facts(&mut cluster, "first"), first);

    // The node can be added again, also while an agent of it starts or leaves. That agent may still register its Node and end a pod, so
    // a ReplicaSet starts the next one.
    for action in ["add", "remove", "add"] {
        cluster.shell(&format!("echo {action} node2 > $MEMBERSHIP"));
    }
    cluster.create_objects(&[replica_set("third", "node2")]);
    cluster.shell(
        "kubectl wait replicaset/third --for=jsonpath={.status.readyReplicas}=1 --timeout=50s",
    );
    cluster.shell("kubectl delete replicaset third --wait");

    // The old agent leaves only after the new one has given up waiting for it.
    let agent = lab.find("node2", Role::Agent);
    let joined = node_facts(&mut cluster, "node2");
    assert_ne!(joined[0], node2[0]);
    lab.kill("node2", "STOP", &agent);
    cluster.shell("echo remove node2 > $MEMBERSHIP; echo add node2 > $MEMBERSHIP; sleep 6");
    lab.kill("node2", "CONT", &agent);
    wait_until(60, "node2 is another Node", || {
        let (code, uid) = cluster.try_shell("kubectl get node node2 -o jsonpath={.metadata.uid}");
        code == 0 && joined[0] != uid.trim()
    });
    cluster.shell("kubectl wait node/node2 --for=condition=Ready --timeout=50s");

    // The leader deletes the Node of an agent that cannot do it.
    let roles = [Role::AgentGuard, Role::Agent, Role::Hub, Role::HubInside];
    let pids = roles.map(|role| lab.find("node2", role).pid.to_string());
    lab.root("node2", &format!("kill -KILL {}", pids.join(" ")));
    cluster.shell("echo remove node2 > $MEMBERSHIP");
    wait_for_nodes(&mut cluster, "node/node1");
    assert_eq!(node_facts(&mut cluster, "node1"), node1);
    assert_eq!(pod_facts(&mut cluster, "first"), first);

    cluster.exit(0);
    lab.remove("changing-cluster");
    lab.assert_nothing_left();
}
