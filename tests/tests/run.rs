//! `coracle run` by srun, sbatch, salloc and outside of a job.

use e2e::{Lab, Output};

/// Prints the nodes, and whether each is Ready.
const LIST: &str = "kubectl get nodes --no-headers -o custom-columns=N:.metadata.name,R:.status.conditions[-1].type,S:.status.conditions[-1].status";

#[track_caller]
fn assert_two_ready_nodes(output: Output) -> Output {
    output
        .succeeded()
        .stdout_is("node1   Ready   True\nnode2   Ready   True")
}

fn list(args: &[&'static str]) -> Vec<&'static str> {
    args.iter().copied().chain(LIST.split(' ')).collect()
}

#[test]
fn srun_starts_a_cluster_of_two_nodes() {
    let lab = Lab::acquire();
    assert_two_ready_nodes(lab.command(&list(&["srun", "-N2", "coracle", "run"])).run());
    lab.assert_nothing_left();
}

#[test]
fn batch_script_starts_a_cluster() {
    let lab = Lab::acquire();
    let script = lab.write("batch.sh", &format!("#!/bin/bash\ncoracle run {LIST}\n"));
    lab.sh(&format!(
        "sbatch --wait --quiet -N2 -o out.txt -e err.txt {script}"
    ))
    .run()
    .succeeded();
    assert_two_ready_nodes(lab.sh("cat out.txt").run());
    lab.sh("cat err.txt")
        .run()
        .succeeded()
        .stdout_has(&["with 2 nodes is ready"]);
    for file in ["batch.sh", "out.txt", "err.txt"] {
        lab.remove(file);
    }
    lab.assert_nothing_left();
}

#[test]
fn srun_in_batch_script_starts_a_cluster() {
    let lab = Lab::acquire();
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
        .stdout_has(&["node1   Ready   True\nnode2   Ready   True"]);
    for file in ["batch.sh", "out.txt"] {
        lab.remove(file);
    }
    lab.assert_nothing_left();
}

#[test]
fn salloc_shell_starts_leader_on_first_node() {
    let lab = Lab::acquire();
    let args = ["salloc", "--quiet", "-N2", "bash", "-c"];
    let script = format!("hostname; coracle run hostname; coracle run {LIST}");
    let output = lab
        .command(&[&args[..], &[&script]].concat())
        .run()
        .succeeded();
    output.stdout_is("login\nnode1\nnode1   Ready   True\nnode2   Ready   True");
    lab.assert_nothing_left();
}

#[test]
fn slurm_options_are_passed_on_outside_of_job() {
    let lab = Lab::acquire();
    for options in [
        &["-N2"][..],
        &["-N", "2", "-p", "long"],
        &["--nodes=2", "--partition=long", "--time", "5"],
        &["--nodes", "2", "-v", "--mem=1G", "-J", "mine"],
    ] {
        let args: Vec<&'static str> = ["coracle", "run"].iter().chain(options).copied().collect();
        assert_two_ready_nodes(lab.command(&list(&args)).run());
    }
    lab.assert_nothing_left();
}

#[test]
fn several_tasks_per_node_make_one_cluster() {
    let lab = Lab::acquire();
    assert_two_ready_nodes(
        lab.command(&list(&["srun", "-n4", "-N2", "coracle", "run"]))
            .run(),
    );
    assert_two_ready_nodes(
        lab.command(&list(&["coracle", "run", "-N2", "-n", "4"]))
            .run(),
    );
    lab.assert_nothing_left();
}

#[test]
fn one_node_is_enough_for_a_cluster() {
    let lab = Lab::acquire();
    let output = lab
        .command(&list(&["srun", "-N1", "coracle", "run"]))
        .run()
        .succeeded();
    output.stdout_is("node1   Ready   True");
    lab.assert_nothing_left();
}

#[test]
fn two_clusters_can_run_successively_in_a_job() {
    let lab = Lab::acquire();
    let script = "for i in 1 2; do srun coracle run kubectl get configmap mine --ignore-not-found -o name; \
                  srun coracle run kubectl create configmap mine; done";
    let output = lab
        .command(&["salloc", "--quiet", "-N2", "bash", "-c", script])
        .run()
        .succeeded();
    let output = output.stdout_is("configmap/mine created\nconfigmap/mine created");
    let names = output.stderr.split_whitespace();
    let names: std::collections::HashSet<_> = names.filter(|w| w.starts_with("coracle-")).collect();
    assert_eq!(names.len(), 4, "each cluster has its own name{output}");
    lab.assert_nothing_left();
}

#[test]
fn stdout_is_the_workloads_progress_on_stderr() {
    let lab = Lab::acquire();
    let output = lab
        .command(&[
            "srun",
            "-N2",
            "coracle",
            "run",
            "sh",
            "-c",
            "echo data; echo message >&2",
        ])
        .run();
    let output = output.succeeded().stdout_is("data");
    let phases = [
        "control plane responds (",
        "2 nodes are Ready (",
        "service accounts exist (",
        " is ready after ",
    ];
    output.stderr_has(&phases).stderr_has(&["message"]);
    lab.assert_nothing_left();
}

#[test]
fn cluster_works_without_subordinate_ids() {
    let lab = Lab::acquire();
    assert_two_ready_nodes(
        lab.command(&list(&["srun", "-N2", "coracle", "run"]))
            .user("user2")
            .run(),
    );
    lab.assert_nothing_left();
}

#[test]
fn slurm_options_inside_a_job_cause_a_warning() {
    let lab = Lab::acquire();
    let output = lab
        .command(&["srun", "-N1", "coracle", "run", "-N7", "true"])
        .run()
        .succeeded();
    output.stderr_has(&["already inside job", "no effect: -N7"]);
    // One task prints it, and salloc's shell too.
    for script in [
        "srun -N2 coracle run -N7 true",
        "salloc --quiet -N1 coracle run -N7 true",
    ] {
        let output = lab.sh(script).run().succeeded();
        let count = output.stderr.matches("no effect: -N7").count();
        assert_eq!(count, 1, "{script}{output}");
    }
    lab.assert_nothing_left();
}

#[test]
fn workload_started_from_a_terminal_has_one() {
    let lab = Lab::acquire();
    lab.sh("script -qec 'coracle run -N1 bash -c \"tty; exit 5\"' /dev/null")
        .run()
        .exited_with(5)
        .stdout_has(&["/dev/pts/"]);
    lab.assert_nothing_left();
}
