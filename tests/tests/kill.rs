//! SIGKILL of each of Coracle's processes: the cluster recovers or ends with an error, and nothing is left.

use e2e::{Lab, Role, TestCluster, WAIT_FOR_SIGTERM, pod, script_container, wait_until};
use serde_json::json;

/// Kills a process that cannot be replaced: the cluster must end soon, with an error, and leave nothing.
#[track_caller]
fn assert_cluster_ends_without(role: Role) -> e2e::Output {
    let lab = Lab::acquire();
    let cluster = TestCluster::start(&lab);
    lab.kill("node1", "KILL", &lab.find("node1", role));
    let output = cluster.ends_within(25);
    assert_ne!(output.code, 0, "{output}");
    lab.assert_nothing_left();
    output
}

/// Kills a process that is replaced: the cluster must recover, with all of its objects.
#[track_caller]
fn assert_cluster_recovers(host: &str, role: Role) -> String {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    cluster.shell("kubectl create configmap kept --from-literal=a=b");
    let before = lab.find(host, role);
    lab.kill(host, "KILL", &before);
    wait_until(20, "a new process runs", || {
        lab.find(host, role).pid != before.pid
    });
    wait_until(20, "both nodes are Ready again", || {
        cluster.has_ready_nodes(2)
    });
    cluster.shell("kubectl get configmap kept");
    let stderr = cluster.exit(0).stderr;
    lab.assert_nothing_left();
    stderr
}

/// Kills a process that cannot be replaced while pods run on both nodes.
#[track_caller]
fn assert_pods_and_cluster_end_without(role: Role) {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    let on = |node: &str| {
        let more = json!({"nodeName": node, "restartPolicy": "Always"});
        pod(
            &format!("pod-{node}"),
            more,
            &[script_container("main", WAIT_FOR_SIGTERM, json!({}))],
        )
    };
    cluster.create_running(&[on("node1"), on("node2")]);
    lab.kill("node1", "KILL", &lab.find("node1", role));
    let output = cluster.ends_within(45);
    assert_ne!(output.code, 0, "{output}");
    lab.assert_nothing_left();
}

#[test]
fn cluster_ends_without_leaders_guard() {
    assert_cluster_ends_without(Role::LeaderGuard);
}

#[test]
fn pods_end_without_leaders_guard() {
    assert_pods_and_cluster_end_without(Role::LeaderGuard);
}

#[test]
fn cluster_ends_without_leader() {
    assert_cluster_ends_without(Role::LeaderWorker);
}

#[test]
fn pods_end_without_leader() {
    assert_pods_and_cluster_end_without(Role::LeaderWorker);
}

#[test]
fn cluster_ends_without_control_planes_outer_process() {
    assert_cluster_ends_without(Role::ControlPlaneOuter)
        .exited_with(76)
        .stderr_has(&["control plane"]);
}

#[test]
fn cluster_ends_without_control_planes_first_process() {
    assert_cluster_ends_without(Role::ControlPlaneFirst)
        .exited_with(76)
        .stderr_has(&["control plane"]);
}

#[test]
fn etcd_is_restarted_with_its_data() {
    let stderr = assert_cluster_recovers("node1", Role::Component("etcd"));
    assert!(stderr.contains("etcd exited with signal: 9"), "{stderr}");
}

#[test]
fn api_server_is_restarted() {
    let stderr = assert_cluster_recovers("node1", Role::Component("kube-apiserver"));
    assert!(
        stderr.contains("kube-apiserver exited with signal: 9"),
        "{stderr}"
    );
}

#[test]
fn scheduler_is_restarted() {
    assert_cluster_recovers("node1", Role::Component("kube-scheduler"));
}

#[test]
fn controller_manager_is_restarted() {
    assert_cluster_recovers("node1", Role::Component("kube-controller-manager"));
}

#[test]
fn agent_is_restarted_by_its_guard() {
    assert_cluster_recovers("node2", Role::Agent);
}

#[test]
fn agents_guard_is_replaced_by_a_new_step() {
    assert_cluster_recovers("node2", Role::AgentGuard);
}

#[test]
fn agent_on_the_leaders_node_is_restarted() {
    assert_cluster_recovers("node1", Role::Agent);
}

#[test]
fn agents_survive_kill_of_their_srun() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let agents = ["node1", "node2"].map(|node| (node, lab.find(node, Role::Agent)));
    let srun = lab.find("node1", Role::AgentSrun);
    lab.kill("node1", "KILL", &srun);
    wait_until(10, "the srun has exited", || !lab.is_alive("node1", &srun));
    // A replacement would be started after two seconds.
    std::thread::sleep(std::time::Duration::from_secs(4));
    for (node, agent) in &agents {
        assert!(lab.is_alive(node, agent), "{agent:?}");
    }
    assert!(cluster.has_ready_nodes(2));
    // The agents' output is lost, but they end with the cluster.
    let output = cluster.exit(0);
    assert!(!output.stderr.contains("is lost"), "{output}");
    lab.assert_nothing_left();
}

#[test]
fn cluster_ends_without_all_processes_on_first_node() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    let [deleted, retained] = ["Delete", "Retain"].map(|policy| volume(&lab, &mut cluster, policy));
    kill_all_of_user1(&lab, "node1");
    // The agent of the other node ends the waiting task there. If that agent was killed too, the task ends by itself.
    let output = cluster.ends_within(60);
    assert_ne!(output.code, 0, "{output}");
    // No process is left that could remove the node's directory. The user's next cluster on that node removes it once it is old.
    lab.root("node1", "touch -d '-10 minutes' /tmp/coracle-*");
    wait_until(30, "Slurm has noticed the end of the job", || {
        lab.queue_is_empty()
    });
    let exists = |dir: &str| lab.sh(&format!("test -e {dir}")).run().code == 0;
    assert!(exists(&deleted) && exists(&retained));
    lab.command(&["srun", "-N1", "-w", "node1", "coracle", "run", "true"])
        .run()
        .succeeded();
    assert!(!exists(&deleted) && exists(&retained));
    lab.sh(&format!("rm -r {retained} && ! ls {deleted}.*"))
        .run()
        .succeeded();
    lab.assert_nothing_left();
}

/// Creates a claim and sets the reclaim policy of its volume; returns the volume's directory.
#[track_caller]
fn volume(lab: &Lab, cluster: &mut TestCluster, policy: &str) -> String {
    let name = policy.to_lowercase();
    let claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    });
    cluster.create(lab, &claim.to_string());
    cluster.shell(&format!(
        "kubectl wait pvc/{name} --for=jsonpath='{{.status.phase}}'=Bound --timeout=30s"
    ));
    let volume = cluster.json(&format!("get pvc {name}"))["spec"]["volumeName"].clone();
    let volume = volume.as_str().expect("a bound claim").to_owned();
    let patch = json!({"spec": {"persistentVolumeReclaimPolicy": policy}});
    cluster.shell(&format!("kubectl patch pv {volume} -p '{patch}'"));
    let path = cluster.json(&format!("get pv {volume}"))["spec"]["hostPath"]["path"].clone();
    path.as_str().expect("a shared volume").to_owned()
}

/// The hubs and janitors survive, and no other agent comes.
#[test]
fn nodes_are_cleaned_up_without_leader_and_agents() {
    let lab = Lab::acquire();
    let cluster = TestCluster::start(&lab);
    for (node, roles) in [
        (
            "node1",
            &[
                Role::LeaderGuard,
                Role::LeaderWorker,
                Role::AgentGuard,
                Role::Agent,
            ][..],
        ),
        ("node2", &[Role::AgentGuard, Role::Agent]),
    ] {
        let pids = roles.iter().map(|role| lab.find(node, *role).pid);
        let pids: Vec<_> = pids.map(|pid| pid.to_string()).collect();
        lab.root(node, &format!("kill -KILL {}", pids.join(" ")));
    }
    // The waiting task on node2 ends by itself.
    let output = cluster.ends_within(60);
    assert_ne!(output.code, 0, "{output}");
    lab.assert_nothing_left();
}

#[test]
fn cluster_recovers_from_kill_of_another_nodes_processes() {
    let lab = Lab::acquire();
    let mut cluster = TestCluster::start(&lab);
    kill_all_of_user1(&lab, "node2");
    wait_until(30, "both nodes are Ready again", || {
        cluster.has_ready_nodes(2)
    });
    cluster.run.write("exit 0\n");
    // srun returns the highest exit code of its tasks, and one was killed.
    cluster.ends_within(30).exited_with(128 + 9);
    lab.assert_nothing_left();
}

#[test]
fn cluster_ends_without_submitting_coracle_run() {
    let lab = Lab::acquire();
    let cluster = TestCluster::start_as(&lab, "user1", &["coracle", "run", "-N2"]);
    let submitter = lab
        .processes_of("login", "user1")
        .into_iter()
        .find(|p| p.args.starts_with("coracle run"));
    lab.kill("login", "KILL", &submitter.unwrap());
    cluster.ends_within(5).exited_with(128 + 9);
    lab.assert_nothing_left();
}

#[test]
fn cluster_ends_without_the_users_srun() {
    let lab = Lab::acquire();
    let cluster = TestCluster::start(&lab);
    for srun in lab
        .processes_of("login", "user1")
        .iter()
        .filter(|p| p.args.starts_with("srun -N2"))
    {
        lab.kill("login", "KILL", srun);
    }
    cluster.ends_within(5).exited_with(128 + 9);
    // Slurm has to notice by itself that the user's srun has exited.
    wait_until(60, "the job has ended", || lab.queue_is_empty());
    lab.assert_nothing_left();
}

fn kill_all_of_user1(lab: &Lab, host: &str) {
    let pids: Vec<String> = lab
        .processes_of(host, "user1")
        .iter()
        .map(|process| process.pid.to_string())
        .collect();
    assert!(pids.len() > 1, "{pids:?}");
    lab.root(host, &format!("kill -KILL {}", pids.join(" ")));
}
