//! What takes a minute or more: `cargo nextest run -E 'not binary(slow)'` leaves it out.

use std::time::Duration;

use e2e::{Cluster, Lab, wait_until};

/// All at once: a step that Slurm signals itself, a batch script, which it doesn't, and pods.
#[test]
fn the_time_limit_ends_a_cluster_in_order() {
    const POLITE: &str =
        "trap 'echo got TERM; exit 3' TERM; echo running; while :; do sleep 0.05; done";
    let lab = Lab::ready();
    lab.load_busybox();
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
    let mut cluster = Cluster::start_as(
        &lab,
        "user1",
        &["srun", "-t", "1", "-N1", "-wnode3", "coracle", "run"],
    );
    let watched = cluster.with_polite_pods(&lab, &["node3"]);
    step.wait(Duration::from_secs(150))
        .shows(&["running", "got TERM"]);
    let _ = cluster.ends_within(60);
    // Slurm here (proctrack/linuxproc) signals every process of a job itself, containers too: a hook may come too late.
    let said = e2e::said_goodbye(&lab, &watched, &["node3"]);
    assert!(
        said[0].contains("term") && said[0].contains("side"),
        "{said:?}"
    );
    wait_until(30, "the batch job has ended", || lab.queue_is_empty());
    lab.sh("cat out.txt").run().shows(&["running", "got TERM"]);
    lab.remove("batch.sh");
    lab.remove("out.txt");
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
