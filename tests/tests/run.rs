//! `coracle run` in all the ways in which users of Slurm start programs.

use e2e::{Lab, Output};

/// Prints the nodes, and whether each is Ready.
const LIST: &str = "kubectl get nodes --no-headers -o custom-columns=N:.metadata.name,R:.status.conditions[-1].type,S:.status.conditions[-1].status";

#[track_caller]
fn shows_two_ready_nodes(output: Output) -> Output {
    output
        .succeeded()
        .printed("node1   Ready   True\nnode2   Ready   True")
}

fn list(words: &[&'static str]) -> Vec<&'static str> {
    words.iter().copied().chain(LIST.split(' ')).collect()
}

#[test]
fn srun_starts_a_cluster_of_two_nodes() {
    let lab = Lab::ready();
    shows_two_ready_nodes(lab.call(&list(&["srun", "-N2", "coracle", "run"])).run());
    lab.nothing_left();
}

#[test]
fn batch_script_starts_a_cluster() {
    let lab = Lab::ready();
    let script = lab.write("batch.sh", &format!("#!/bin/bash\ncoracle run {LIST}\n"));
    lab.sh(&format!(
        "sbatch --wait --quiet -N2 -o out.txt -e err.txt {script}"
    ))
    .run()
    .succeeded();
    shows_two_ready_nodes(lab.sh("cat out.txt").run());
    lab.sh("cat err.txt")
        .run()
        .succeeded()
        .shows(&["with 2 nodes is ready"]);
    for file in ["batch.sh", "out.txt", "err.txt"] {
        lab.remove(file);
    }
    lab.nothing_left();
}

#[test]
fn srun_in_batch_script_starts_a_cluster() {
    let lab = Lab::ready();
    let script = lab.write(
        "batch.sh",
        &format!("#!/bin/bash\nsrun coracle run {LIST}\n"),
    );
    lab.sh(&format!("sbatch --wait --quiet -N2 -o out.txt {script}"))
        .run()
        .succeeded();
    lab.sh("cat out.txt")
        .run()
        .succeeded()
        .shows(&["node1   Ready   True\nnode2   Ready   True"]);
    for file in ["batch.sh", "out.txt"] {
        lab.remove(file);
    }
    lab.nothing_left();
}

#[test]
fn salloc_shell_starts_leader_on_first_node() {
    let lab = Lab::ready();
    let words = ["salloc", "--quiet", "-N2", "bash", "-c"];
    let script = format!("hostname; coracle run hostname; coracle run {LIST}");
    let output = lab
        .call(&[&words[..], &[&script]].concat())
        .run()
        .succeeded();
    output.printed("login\nnode1\nnode1   Ready   True\nnode2   Ready   True");
    lab.nothing_left();
}

#[test]
fn slurm_options_are_passed_on_outside_of_job() {
    let lab = Lab::ready();
    for options in [
        &["-N2"][..],
        &["-N", "2", "-p", "long"],
        &["--nodes=2", "--partition=long", "--time", "5"],
        &["--nodes", "2", "-v", "--mem=1G", "-J", "mine"],
    ] {
        let words: Vec<&'static str> = ["coracle", "run"].iter().chain(options).copied().collect();
        shows_two_ready_nodes(lab.call(&list(&words)).run());
    }
    lab.nothing_left();
}

#[test]
fn several_tasks_per_node_make_one_cluster() {
    let lab = Lab::ready();
    shows_two_ready_nodes(
        lab.call(&list(&["srun", "-n4", "-N2", "coracle", "run"]))
            .run(),
    );
    shows_two_ready_nodes(lab.call(&list(&["coracle", "run", "-N2", "-n", "4"])).run());
    lab.nothing_left();
}

#[test]
fn one_node_is_enough_for_a_cluster() {
    let lab = Lab::ready();
    let output = lab
        .call(&list(&["srun", "-N1", "coracle", "run"]))
        .run()
        .succeeded();
    output.printed("node1   Ready   True");
    lab.nothing_left();
}

#[test]
fn two_clusters_can_run_successively_in_a_job() {
    let lab = Lab::ready();
    let script = "for i in 1 2; do srun coracle run kubectl get configmap mine --ignore-not-found -o name; \
                  srun coracle run kubectl create configmap mine; done";
    let output = lab
        .call(&["salloc", "--quiet", "-N2", "bash", "-c", script])
        .run()
        .succeeded();
    let output = output.printed("configmap/mine created\nconfigmap/mine created");
    let names = output.stderr.split_whitespace();
    let names: std::collections::HashSet<_> = names.filter(|w| w.starts_with("coracle-")).collect();
    assert_eq!(names.len(), 4, "each has a name of its own{output}");
    lab.nothing_left();
}

#[test]
fn stdout_is_the_workloads_and_progress_is_on_stderr() {
    let lab = Lab::ready();
    let output = lab
        .call(&[
            "srun",
            "-N2",
            "coracle",
            "run",
            "sh",
            "-c",
            "echo data; echo words >&2",
        ])
        .run();
    let output = output.succeeded().printed("data");
    let phases = [
        "control plane answers (",
        "2 nodes are Ready (",
        "service accounts are there (",
        " is ready after ",
    ];
    output.says(&phases).says(&["words"]);
    lab.nothing_left();
}

#[test]
fn cluster_works_without_subordinate_ids() {
    let lab = Lab::ready();
    shows_two_ready_nodes(
        lab.call(&list(&["srun", "-N2", "coracle", "run"]))
            .user("user2")
            .run(),
    );
    lab.nothing_left();
}

#[test]
fn slurm_options_inside_of_a_job_cause_a_warning() {
    let lab = Lab::ready();
    let output = lab
        .call(&["srun", "-N1", "coracle", "run", "-N7", "true"])
        .run()
        .succeeded();
    output.says(&["already inside job", "no effect: -N7"]);
    lab.nothing_left();
}

#[test]
fn workload_started_from_a_terminal_has_one() {
    let lab = Lab::ready();
    lab.sh("script -qec 'coracle run -N1 bash -c \"tty; exit 5\"' /dev/null")
        .run()
        .ended_with(5)
        .shows(&["/dev/pts/"]);
    lab.nothing_left();
}
