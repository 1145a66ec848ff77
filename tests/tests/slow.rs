//! Tests that take a minute or more: `cargo nextest run -E 'not binary(slow)'` excludes them.

use std::time::Duration;

use e2e::{Cluster, Lab, wait_until};

/// In parallel: a step, which Slurm signals itself, and a batch script, which it doesn't.
#[test]
fn time_limit_shuts_down_cluster_in_order() {
    const POLITE: &str =
        "trap 'echo got TERM; exit 3' TERM; echo running; while :; do sleep 0.05; done";
    let lab = Lab::ready();
    lab.write(
        "batch.sh",
        &format!("#!/bin/bash\ncoracle run bash -c \"{POLITE}\"\n"),
    );
    lab.sh("sbatch -t 1 -N2 -o out.txt batch.sh")
        .run()
        .succeeded();
    let step = lab
        .call(&[
            "srun", "-t", "1", "-N2", "coracle", "run", "bash", "-c", POLITE,
        ])
        .start();
    step.wait(Duration::from_secs(150))
        .shows(&["running", "got TERM"]);
    wait_until(30, "the batch job has ended", || lab.queue_is_empty());
    lab.sh("cat out.txt").run().shows(&["running", "got TERM"]);
    lab.remove("batch.sh");
    lab.remove("out.txt");
    lab.nothing_left();
}

/// Pods get their grace period, and their final status is reported before the API server stops: when a job is cancelled, and when
/// it reaches its time limit; for pods that are children of their agent, and for pods that are steps, which Slurm signals too. In a
/// separate lab with proctrack/cgroup: like at most sites, Slurm then signals only a job's tasks and not all of their descendants.
#[test]
fn pods_terminate_gracefully_when_their_job_ends() {
    let lab = Lab::make("/run/coracle-lab-goodbye", &["--proctrack", "cgroup"], 4);
    lab.load_busybox();
    let lab = lab.look_again();
    let start = |words: &[&str], node: &str| {
        let mut cluster = Cluster::start_as(&lab, "user1", words);
        let watched = cluster.with_polite_pods(&lab, &[node]);
        (cluster, watched)
    };
    let below_agent = |option: &str, node: &str| {
        let place = format!("--nodelist={node}");
        start(&["srun", option, "-N1", &place, "coracle", "run"], node)
    };
    let as_step = |option: &str, node: &str| {
        let place = format!("--nodelist={node}");
        let words = ["coracle", "run", "--pods-as-steps", option, "-N1", &place];
        let started = start(&words, node);
        let steps = lab.call(&["scontrol", "--oneliner", "show", "step"]).run();
        let name = format!(" Name=default/polite-{node} ");
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
    for ((cluster, watched), node) in cancelled {
        let _ = cluster.ends_within(60);
        let said = e2e::said_goodbye(&lab, &watched, &[node]);
        assert_eq!(said, ["hook term side"], "{node}, cancelled");
    }
    for ((cluster, watched), node) in limited {
        let _ = cluster.ends_within(150);
        let said = e2e::said_goodbye(&lab, &watched, &[node]);
        assert_eq!(said, ["hook term side"], "{node}, over");
    }
    lab.nothing_left();
}

#[test]
fn cluster_of_sixteen_nodes_starts() {
    let lab = Lab::make("/run/coracle-lab-sixteen", &[], 16);
    let words = [
        "srun",
        "-N16",
        "coracle",
        "run",
        "kubectl",
        "get",
        "nodes",
        "--no-headers",
    ];
    let output = lab.call(&words).within(120).run().succeeded();
    let ready = output
        .stdout
        .lines()
        .filter(|line| line.contains(" Ready "))
        .count();
    assert_eq!(ready, 16, "{output}");
    lab.nothing_left();
}
