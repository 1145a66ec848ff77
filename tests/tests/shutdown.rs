//! Shutdown of a cluster by signals, by Slurm and by its workload: in order, and nothing is left.

use std::time::Duration;

use e2e::{Lab, Running};
use rustix::process::Signal;

/// Prints a line when it runs, and another on a signal.
const GRACEFUL: &str = r#"
for s in TERM INT HUP; do trap "echo got $s; exit 3" $s; done
echo running
while :; do sleep 0.05; done
"#;

/// Prints each signal, and continues.
const IGNORES_SIGNALS: &str = r#"
for s in TERM INT HUP; do trap "echo got $s" $s; done
echo running
while :; do sleep 0.05; done
"#;

fn start(lab: &Lab, args: &[&str], workload: &str) -> Running {
    let mut running = lab
        .command(&[args, &["bash", "-c", workload]].concat())
        .start();
    running.wait_for_stdout("running");
    running
}

#[track_caller]
fn exits_after_signal(running: Running, seconds: u64) -> e2e::Output {
    let output = running.wait(Duration::from_secs(seconds));
    output.stdout_has(&["got "])
}

#[test]
fn ctrl_c_on_srun_shuts_down_in_order() {
    let lab = Lab::acquire();
    // With -X, srun forwards the signal. Without, it only prints the state of the tasks.
    let running = start(&lab, &["srun", "-X", "-N2", "coracle", "run"], GRACEFUL);
    running.signal(Signal::INT);
    exits_after_signal(running, 20);
    lab.assert_nothing_left();
}

#[test]
fn second_ctrl_c_on_srun_ends_the_cluster() {
    let lab = Lab::acquire();
    let mut running = start(&lab, &["srun", "-N2", "coracle", "run"], GRACEFUL);
    running.signal(Signal::INT);
    running.wait_for_stderr("interrupt");
    running.signal(Signal::INT);
    // srun forwards this one and kills all tasks at once, so the workload may or may not handle it.
    let output = running.wait(Duration::from_secs(20));
    assert!(output.code != 0, "{output}");
    lab.assert_nothing_left();
}

#[test]
fn ctrl_c_outside_a_job_ends_the_cluster() {
    let lab = Lab::acquire();
    let running = start(&lab, &["coracle", "run", "-N2"], GRACEFUL);
    running.signal(Signal::INT);
    exits_after_signal(running, 20).exited_with(3);
    lab.assert_nothing_left();
}

#[test]
fn sigterm_on_srun_ends_the_cluster() {
    let lab = Lab::acquire();
    // srun turns it into an immediate SIGKILL, so an orderly shutdown is impossible.
    let running = start(&lab, &["srun", "-N2", "coracle", "run"], GRACEFUL);
    running.signal(Signal::TERM);
    let output = running.wait(Duration::from_secs(20));
    assert_ne!(output.code, 0, "{output}");
    lab.assert_nothing_left();
}

#[test]
fn sigterm_outside_of_a_job_ends_the_cluster() {
    let lab = Lab::acquire();
    let running = start(&lab, &["coracle", "run", "-N2"], GRACEFUL);
    running.signal(Signal::TERM);
    exits_after_signal(running, 20);
    lab.assert_nothing_left();
}

#[test]
fn ctrl_c_while_the_cluster_starts_ends_it() {
    let lab = Lab::acquire();
    let running = lab
        .command(&["coracle", "run", "-N2", "bash", "-c", GRACEFUL])
        .start();
    e2e::wait_until(20, "etcd runs", || {
        lab.processes_of("node1", "user1")
            .iter()
            .any(|process| process.args.contains("/programs/etcd"))
    });
    running.signal(Signal::INT);
    let output = running.wait(Duration::from_secs(20));
    assert_ne!(output.code, 0, "{output}");
    lab.assert_nothing_left();
}

#[test]
fn scancel_ends_the_cluster() {
    let lab = Lab::acquire();
    let running = start(&lab, &["srun", "-N2", "coracle", "run"], GRACEFUL);
    lab.sh("scancel --me").run().succeeded();
    exits_after_signal(running, 20);
    lab.assert_nothing_left();
}

#[test]
fn scancel_of_a_batch_job_ends_the_cluster() {
    let lab = Lab::acquire();
    let workload = lab.write("workload.sh", &format!("#!/bin/bash\n{GRACEFUL}"));
    let batch = format!("#!/bin/bash\ncoracle run {workload}\n");
    let script = lab.write("batch.sh", &batch);
    lab.sh(&format!("sbatch -N2 -o out.txt {script}"))
        .run()
        .succeeded();
    let out = || lab.sh("cat out.txt").run().stdout;
    e2e::wait_until(30, "the workload runs", || out().contains("running"));
    // Slurm signals the steps, and so the agents, but not the batch script.
    lab.sh("scancel --me").run().succeeded();
    e2e::wait_until(20, "the workload got a signal", || out().contains("got "));
    lab.sh("while squeue -h | grep -q .; do sleep 0.1; done")
        .run()
        .succeeded();
    for file in ["workload.sh", "batch.sh", "out.txt"] {
        lab.remove(file);
    }
    lab.assert_nothing_left();
}

#[test]
fn workload_ignoring_sigterm_is_killed_within_kill_wait() {
    let lab = Lab::acquire();
    let running = start(&lab, &["srun", "-N2", "coracle", "run"], IGNORES_SIGNALS);
    lab.sh("scancel --me").run().succeeded();
    // KillWait is 15 s in the lab. The workload gets a part of it.
    exits_after_signal(running, 15);
    lab.assert_nothing_left();
}

#[test]
fn second_ctrl_c_kills_workload_at_once() {
    let lab = Lab::acquire();
    let mut running = start(&lab, &["coracle", "run", "-N2"], IGNORES_SIGNALS);
    running.signal(Signal::INT);
    running.wait_for_stdout("got INT");
    running.signal(Signal::INT);
    running.wait(Duration::from_secs(7)).exited_with(128 + 9);
    lab.assert_nothing_left();
}

#[test]
fn closed_terminal_ends_the_cluster() {
    let lab = Lab::acquire();
    let running = start(&lab, &["coracle", "run", "-N2"], GRACEFUL);
    running.signal(Signal::HUP);
    let _ = running.wait(Duration::from_secs(20));
    lab.assert_nothing_left();
}

#[test]
fn ctrl_c_ends_manifests_that_never_complete() {
    let lab = Lab::acquire();
    let manifest = lab.write("web.yaml", include_str!("manifests/deployment.yaml"));
    let mut running = lab.command(&["coracle", "run", "-N2", &manifest]).start();
    running.wait_for_stderr("nothing in these manifests ends by itself");
    running.signal(Signal::INT);
    running.wait(Duration::from_secs(20)).exited_with(128 + 2);
    lab.remove("web.yaml");
    lab.assert_nothing_left();
}

#[test]
fn background_processes_end_with_the_workload() {
    let lab = Lab::acquire();
    // Both leave the process tree that proctrack/linuxproc tracks.
    let script = "setsid sleep 1111 & (setsid sh -c 'sleep 2222 & exec sleep 3333' &) ; \
                  setsid --fork bash -c 'trap \"\" TERM INT HUP; exec -a daemon sleep 4444'; \
                  sleep 0.3; ps -eo args | grep -c '^\\(sleep\\|daemon\\) [1-4]'; exit 4";
    let output = lab
        .command(&["srun", "-N2", "coracle", "run", "bash", "-c", script])
        .run();
    output.exited_with(4).stdout_is("4");
    lab.assert_nothing_left();
}

/// Background processes of the workload record the shutdown after its exit.
#[test]
fn nodes_are_deleted_and_components_stopped_in_order() {
    const WATCH: &str = r#"
watch() { kubectl get "$@" --watch --output-watch-events --no-headers > "seen.$1" 2>&1 & }
watch nodes
watch leases --namespace kube-node-lease
until pgrep -u user1 -f "^/tmp/programs/kube-controller-manager " >/dev/null; do sleep 0.1; done
wait_for_exit() { while [ -d "/proc/$2" ]; do :; done; echo "$1" >> seen.order; }
for c in etcd kube-apiserver kube-scheduler kube-controller-manager; do
  wait_for_exit "$c" "$(pgrep -u user1 -f "^/tmp/programs/$c ")" &
done
until [ "$(grep -c ADDED seen.nodes)$(grep -c ADDED seen.leases)" = 22 ]; do sleep 0.1; done
sleep 0.5
"#;
    let lab = Lab::acquire();
    lab.write("seen.order", "");
    lab.command(&["srun", "-N2", "coracle", "run", "bash", "-c", WATCH])
        .run()
        .succeeded();
    for kind in ["nodes", "leases"] {
        let seen = lab.sh(&format!("grep DELETED seen.{kind}")).run();
        seen.stdout_has(&["node1", "node2"]);
    }
    // The watcher of the last component may be killed before it records the end.
    let order = lab.sh("cat seen.order").run().stdout;
    let reverse = "kube-controller-manager\nkube-scheduler\nkube-apiserver\netcd\n";
    assert!(
        order.lines().count() >= 3 && reverse.starts_with(&order),
        "{order}"
    );
    lab.sh("rm seen.*").run().succeeded();
    lab.assert_nothing_left();
}
