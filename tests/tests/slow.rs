//! What takes a minute or more: `cargo nextest run -E 'not binary(slow)'` leaves it out.

use std::time::Duration;

use e2e::{Cluster, Lab, wait_until};

/// Both at once: a step that Slurm signals itself, and a batch script, which it doesn't.
#[test]
fn the_time_limit_ends_a_cluster_in_order() {
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

/// Slurm's word reaches pods in time, and how they ended is told before the API server goes: when a job is cancelled, and when
/// its time is over. On a lab of its own, whose Slurm signals a job's tasks and not every process below them, as most do.
#[test]
fn pods_end_in_order_when_their_job_does() {
    let lab = Lab::make("/run/coracle-lab-goodbye", &["--proctrack", "cgroup"], 2);
    lab.load_busybox();
    let lab = lab.look_again();
    let start = |option: &str, node: &str| {
        let place = format!("--nodelist={node}");
        let words = ["srun", option, "-N1", &place, "coracle", "run"];
        let mut cluster = Cluster::start_as(&lab, "user1", &words);
        let watched = cluster.with_polite_pods(&lab, &[node]);
        (cluster, watched)
    };
    let (limited, of_limited) = start("--time=1", "node1");
    let (cancelled, of_cancelled) = start("--job-name=cancelled", "node2");
    lab.sh("scancel --me --name=cancelled").run().succeeded();
    let _ = cancelled.ends_within(60);
    let said = e2e::said_goodbye(&lab, &of_cancelled, &["node2"]);
    assert_eq!(said, ["hook term side"], "cancelled");
    let _ = limited.ends_within(180);
    let said = e2e::said_goodbye(&lab, &of_limited, &["node1"]);
    assert_eq!(said, ["hook term side"], "over");
    lab.nothing_left();
}

#[test]
fn sixteen_nodes_make_a_cluster() {
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
