//! The Nodes of a cluster match the allocation of the job.

use std::time::{Duration, Instant};

use e2e::{Lab, Role, TestCluster, wait_until};
use serde_json::Value;

fn bytes(quantity: &Value) -> u64 {
    let text = quantity.as_str().expect("a quantity is text");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        other => panic!("unit {other}"),
    };
    digits.parse::<u64>().expect("a whole number") * unit
}

#[test]
fn capacity_is_what_slurm_allocated() {
    let lab = Lab::acquire();
    let args = [
        "srun",
        "-N1",
        "-wnode1",
        "-c4",
        "--mem=1000",
        "--gres=gpu:2",
        "coracle",
        "run",
    ];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    let node = cluster.json("get node node1");
    for kind in ["capacity", "allocatable"] {
        let resources = &node["status"][kind];
        assert_eq!(resources["cpu"], "4", "{resources}");
        assert_eq!(bytes(&resources["memory"]), 1000 << 20, "{resources}");
        assert_eq!(resources["nvidia.com/gpu"], "2", "{resources}");
        assert_eq!(resources["pods"], "110", "{resources}");
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn node_without_gpus_has_none() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    for node in ["node1", "node2"] {
        let node = cluster.json(&format!("get node {node}"));
        assert!(
            node["status"]["capacity"].get("nvidia.com/gpu").is_none(),
            "{node}"
        );
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn addresses_labels_and_conditions_match_allocation() {
    let lab = Lab::acquire();
    let mut cluster =
        TestCluster::start_as(&lab, "user1", &["srun", "-N2", "-plong", "coracle", "run"]);
    let job = cluster.shell("echo $SLURM_JOB_ID");
    for (name, address) in [("node1", "10.77.0.11"), ("node2", "10.77.0.12")] {
        let node = cluster.json(&format!("get node {name}"));
        let labels = &node["metadata"]["labels"];
        for (label, value) in [
            ("kubernetes.io/hostname", name),
            ("kubernetes.io/arch", "amd64"),
            ("kubernetes.io/os", "linux"),
            ("coracle.dev/partition", "long"),
            ("coracle.dev/job-id", &job),
        ] {
            assert_eq!(labels[label], *value, "{labels}");
        }
        let addresses = node["status"]["addresses"].as_array().unwrap();
        let has = |kind: &str, value: &str| {
            addresses
                .iter()
                .any(|a| a["type"] == kind && a["address"] == value)
        };
        assert!(
            has("InternalIP", address) && has("Hostname", name),
            "{addresses:?}"
        );
        let conditions = node["status"]["conditions"].as_array().unwrap();
        for (kind, status) in [
            ("Ready", "True"),
            ("MemoryPressure", "False"),
            ("DiskPressure", "False"),
            ("PIDPressure", "False"),
        ] {
            assert!(
                conditions
                    .iter()
                    .any(|c| c["type"] == kind && c["status"] == status),
                "{conditions:?}"
            );
        }
        assert_eq!(
            node["status"]["declaredFeatures"],
            serde_json::json!([
                "ExtendWebSocketsToKubelet",
                "RestartAllContainersOnContainerExits"
            ]),
            "{}",
            node["status"]
        );
        assert!(node["spec"].get("taints").is_none(), "{}", node["spec"]);
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn nodes_have_renewed_leases_and_pod_cidrs() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let renewed = |cluster: &mut TestCluster| {
        cluster.json("-n kube-node-lease get lease node2")["spec"]["renewTime"].to_string()
    };
    let first = renewed(&mut cluster);
    wait_until(10, "both nodes have pod CIDRs", || {
        let nodes = cluster.json("get nodes");
        let ranges: Vec<_> = nodes["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n["spec"]["podCIDR"].clone())
            .collect();
        ranges.iter().all(|r| {
            r.as_str()
                .is_some_and(|r| r.starts_with("100.") && r.ends_with("/24"))
        }) && ranges[0] != ranges[1]
    });
    wait_until(20, "the lease is renewed", || {
        renewed(&mut cluster) != first
    });
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn api_server_reaches_every_kubelet() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    for node in ["node1", "node2"] {
        assert_eq!(
            cluster.shell(&format!(
                "kubectl get --raw /api/v1/nodes/{node}/proxy/healthz"
            )),
            "ok"
        );
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn node_is_not_ready_until_agent_is_replaced() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    // Both at the same time: otherwise one would be replaced by the other.
    let (agent, guard) = (
        lab.find("node2", Role::Agent),
        lab.find("node2", Role::AgentGuard),
    );
    // Use a watch: the node is back so soon that polling may miss NotReady.
    lab.remove("seen");
    cluster.shell(
        "(kubectl get node node2 --watch --no-headers > seen 2>&1; true) > /dev/null 2>&1 &",
    );
    let seen = |state: &str| lab.sh(&format!("grep -qw {state} seen")).run().code == 0;
    wait_until(10, "the watch shows the node", || seen("Ready"));
    lab.root("node2", &format!("kill -KILL {} {}", agent.pid, guard.pid));
    let killed = Instant::now();
    wait_until(5, "node2 is NotReady", || seen("NotReady"));
    println!("NotReady after {:?}", killed.elapsed());
    wait_until(20, "node2 is Ready again", || cluster.has_ready_nodes(2));
    cluster.run.wait_for_stderr("node node2 is back");
    cluster.exit(0).stderr_has(&["node node2 is lost"]);
    lab.remove("seen");
    lab.assert_nothing_left();
}

#[test]
fn node_is_not_ready_until_it_boots_again() {
    let mut lab = Lab::acquire();
    // Without --no-kill, Slurm would end the whole job, and an srun with two tasks would wait for the lost one.
    let args = [
        "salloc",
        "--quiet",
        "--no-kill",
        "-N2",
        "-wnode[1-2]",
        "coracle",
        "run",
    ];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    lab.lab_command("kill-host", &["node2"]).succeeded();
    wait_until(30, "node2 is NotReady", || {
        let nodes = cluster.shell("kubectl get nodes --no-headers");
        nodes.contains("node2   NotReady") && nodes.contains("node1   Ready")
    });
    lab.start_host("node2");
    wait_until(60, "node2 is Ready again", || cluster.has_ready_nodes(2));
    cluster.run.wait_for_stderr("node node2 is back");
    cluster.exit(0).stderr_has(&["node node2 is lost"]);
    wait_until(60, "all nodes are idle", || lab.queue_is_empty());
    lab.assert_nothing_left();
}

#[test]
fn loss_of_the_leaders_host_is_an_error() {
    let mut lab = Lab::acquire();
    let args = ["coracle", "run", "-N2", "-wnode[1-2]", "sh", "-c"];
    let script = "echo runs; sleep 150";
    let mut run = lab.command(&[&args[..], &[script]].concat()).start();
    run.wait_for_stdout("runs");
    lab.lab_command("kill-host", &["node1"]).succeeded();
    // Slurm takes half a minute to notice.
    let ended = run.wait(Duration::from_secs(120));
    lab.start_host("node1");
    ended.exited_with(76).stderr_has(&[
        "error: the job ended before the workload did",
        "node1",
        "hint: ",
    ]);
    wait_until(60, "all nodes are idle", || lab.queue_is_empty());
    lab.assert_nothing_left();
}

#[test]
fn unauthenticated_connections_do_not_prevent_enrolment() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let (agent, guard) = (
        lab.find("node2", Role::Agent),
        lab.find("node2", Role::AgentGuard),
    );
    let port = lab.enrolment_port("node2", &agent);
    // More connections than the leader's enrolment listener admits at once, all idle, and reopened again and again.
    let flood = format!(
        "ulimit -n 4096; while :; do for i in $(seq 700); do exec {{fd}}<>/dev/tcp/node1/{port}; done; \
         echo connected; sleep 1; done"
    );
    let mut flood = lab.command(&["bash", "-c", &flood]).user("user2").start();
    flood.wait_for_stdout("connected");
    lab.root("node2", &format!("kill -KILL {} {}", agent.pid, guard.pid));
    wait_until(10, "node2 is NotReady", || !cluster.has_ready_nodes(2));
    wait_until(40, "node2 has joined again", || cluster.has_ready_nodes(2));
    assert!(!flood.has_exited(), "the flood lasts until here");
    flood.signal(rustix::process::Signal::KILL);
    drop(flood);
    for stray in lab.processes_of("login", "user2") {
        lab.kill("login", "KILL", &stray);
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}
