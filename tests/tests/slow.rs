//! Tests that take a minute or more: `cargo nextest run -E 'not binary(slow)'` excludes them.

use std::time::Duration;

use e2e::{Lab, Role, TestCluster, wait_until};

/// In parallel: a step, which Slurm signals itself, and a batch script, which it does not.
#[test]
fn time_limit_shuts_down_cluster_in_order() {
    const GRACEFUL: &str =
        "trap 'echo got TERM; exit 3' TERM; echo running; while :; do sleep 0.05; done";
    let lab = Lab::acquire();
    lab.write(
        "batch.sh",
        &format!("#!/bin/bash\ncoracle run bash -c \"{GRACEFUL}\"\n"),
    );
    lab.sh("sbatch -t 1 -N2 -o out.txt batch.sh")
        .run()
        .succeeded();
    let step = lab
        .command(&[
            "srun", "-t", "1", "-N2", "coracle", "run", "bash", "-c", GRACEFUL,
        ])
        .start();
    step.wait(Duration::from_secs(150))
        .stdout_has(&["running", "got TERM"]);
    wait_until(30, "the batch job has ended", || lab.queue_is_empty());
    lab.sh("cat out.txt")
        .run()
        .stdout_has(&["running", "got TERM"]);
    lab.remove("batch.sh");
    lab.remove("out.txt");
    lab.assert_nothing_left();
}

/// Pods get their grace period, and their final status is reported before the API server stops: when a job is cancelled, and when
/// it reaches its time limit; for pods that are children of their agent, and for pods that are steps, which Slurm signals too. In a
/// separate lab with proctrack/cgroup: like at most sites, Slurm then signals only a job's tasks and not all of their descendants.
#[test]
fn pods_terminate_gracefully_when_their_job_ends() {
    let lab = Lab::create("/run/coracle-lab-graceful", &["--proctrack", "cgroup"], 4);
    lab.load_busybox();
    let lab = lab.with_new_snapshot();
    let start = |args: &[&str], node: &str| {
        let mut cluster = TestCluster::start_as(&lab, "user1", args);
        let watch = cluster.create_graceful_pods(&lab, &[node]);
        (cluster, watch)
    };
    let below_agent = |option: &str, node: &str| {
        let node_list = format!("--nodelist={node}");
        start(&["srun", option, "-N1", &node_list, "coracle", "run"], node)
    };
    let as_step = |option: &str, node: &str| {
        let node_list = format!("--nodelist={node}");
        let args = [
            "coracle",
            "run",
            "--pods-as-steps",
            option,
            "-N1",
            &node_list,
        ];
        let started = start(&args, node);
        let steps = lab
            .command(&["scontrol", "--oneliner", "show", "step"])
            .run();
        let name = format!(" Name=default/graceful-{node} ");
        assert!(steps.stdout.contains(&name), "{node}: {steps}");
        started
    };
    let limited = [
        (below_agent("--time=1", "node1"), "node1"),
        (as_step("--time=1", "node3"), "node3"),
    ];
    let cancelled = [
        (below_agent("--job-name=cancelled", "node2"), "node2"),
        (as_step("--job-name=cancelled", "node4"), "node4"),
    ];
    lab.sh("scancel --me --name=cancelled").run().succeeded();
    for ((cluster, watch), node) in cancelled {
        let _ = cluster.ends_within(60);
        let records = e2e::assert_graceful_termination(&lab, &watch, &[node]);
        assert_eq!(records, ["hook term side"], "{node}, cancelled");
    }
    for ((cluster, watch), node) in limited {
        let _ = cluster.ends_within(150);
        let records = e2e::assert_graceful_termination(&lab, &watch, &[node]);
        assert_eq!(records, ["hook term side"], "{node}, time limit");
    }
    lab.assert_nothing_left();
}

#[test]
fn cluster_of_sixteen_nodes_starts() {
    let lab = Lab::create("/run/coracle-lab-sixteen", &[], 16);
    let args = [
        "srun",
        "-N16",
        "coracle",
        "run",
        "kubectl",
        "get",
        "nodes",
        "--no-headers",
    ];
    let output = lab.command(&args).within(120).run().succeeded();
    let ready = output
        .stdout
        .lines()
        .filter(|line| line.contains(" Ready "))
        .count();
    assert_eq!(ready, 16, "{output}");
    lab.assert_nothing_left();
}

/// A sandbox does not notice that the hub was restarted, and another pod starts meanwhile.
#[test]
fn frozen_sandbox_gets_its_old_address_back() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    let pod = |name: &str, script: &str| {
        let manifest = format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{nodeName: node2, restartPolicy: Never, \
             terminationGracePeriodSeconds: 1, containers: [{{name: c, image: IMAGE, command: [sh, -c, '{script}']}}]}}}}"
        );
        manifest + "\n---\n"
    };
    cluster.create(&lab, &pod("frozen", "httpd -f -p 8080 -h /etc"));
    cluster.wait_for("frozen", "condition=Ready");
    let before = cluster.pod("frozen");
    let address = before["status"]["podIP"].as_str().unwrap().to_owned();

    let processes = lab.processes("node2");
    let is_sandbox = |process: &&e2e::Process| process.args.contains("internal sandbox");
    let mut sandboxes = processes.iter().filter(is_sandbox);
    let supervisor = sandboxes
        .find(|sandbox| {
            let parent = processes.iter().find(|p| p.pid == sandbox.parent);
            !parent.as_ref().is_some_and(is_sandbox)
        })
        .expect("the pod has a sandbox");
    lab.kill("node2", "STOP", supervisor);
    for role in [Role::HubInside, Role::Hub] {
        lab.kill("node2", "KILL", &lab.find("node2", role));
    }
    let thawed = std::time::Instant::now() + Duration::from_secs(65);
    // Its request for an address starts a new hub, and must not get that of the frozen pod.
    cluster.create(&lab, &pod("other", "sleep 1000"));
    cluster.wait_for("other", "condition=Ready");
    assert_ne!(cluster.pod("other")["status"]["podIP"], *address);
    std::thread::sleep(thawed.saturating_duration_since(std::time::Instant::now()));
    lab.kill("node2", "CONT", supervisor);

    let fetch = format!("kubectl exec other -- timeout 2 wget -qO- http://{address}:8080/passwd");
    wait_until(30, "the frozen pod is reachable again", || {
        cluster.try_shell(&fetch).0 == 0
    });
    let after = cluster.pod("frozen");
    assert_eq!(after["status"]["podIP"], *address);
    assert_eq!(
        after["status"]["containerStatuses"][0]["containerID"],
        before["status"]["containerStatuses"][0]["containerID"]
    );
    cluster.exit(0);
    lab.assert_nothing_left();
}
