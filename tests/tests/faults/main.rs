//! Injects faults, chosen by a seed, into a cluster under load. After each round, every pod must be untouched or restarted by its
//! policy, and nothing may be lost or duplicated.
//!
//! ```text
//!   plan.rs ── rounds of faults ──► inject.rs ──► the cluster with workload.rs ──► check.rs, by the rules of model.rs
//! ```
//!
//! `CORACLE_FAULTS_SEED` is the seed, `CORACLE_FAULTS` the number of faults, and `CORACLE_FAULTS_LONGEST` the maximum duration of one
//! in seconds. A round has one fault or two. A fault that finds no victim does not count.

mod check;
mod fault;
mod inject;
mod model;
mod plan;
mod tally;
mod workload;

use std::time::{Duration, Instant};

use check::LongRunningPod;
use e2e::{Lab, SmallDisk, TestCluster};
use fault::{Fault, NODES, Target};
use inject::Injected;
use tally::Tally;

/// Settings for `make test`: always the same faults, and so few that they take two minutes.
const SEED: u64 = 1;
const FAULTS: u64 = 10;
const LONGEST_SECONDS: u64 = 4;

/// Unpacked images are removed as soon as no pod uses them, so that every pull has to unpack.
const IMAGE_GC: &str = "CORACLE_IMAGE_GC=high=0,low=0,age=0,every=1s";

fn setting(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty());
    let number = text.map(|text| text.parse());
    number.unwrap_or(Ok(default)).expect("a number")
}

#[test]
fn injected_faults_lose_and_duplicate_nothing() {
    let seed = setting("CORACLE_FAULTS_SEED", SEED);
    let wanted = setting("CORACLE_FAULTS", FAULTS);
    let longest = Duration::from_secs(setting("CORACLE_FAULTS_LONGEST", LONGEST_SECONDS));
    let settings = format!(
        "CORACLE_FAULTS_SEED={seed} CORACLE_FAULTS={wanted} CORACLE_FAULTS_LONGEST={}",
        longest.as_secs()
    );
    println!("{settings}");
    let wanted = usize::try_from(wanted).expect("a number");
    // A quarter more rounds than wanted faults, because some faults find no victim.
    let rounds = plan::rounds(seed, longest).take(wanted + wanted / 4);

    let lab = Lab::acquire();
    let registry = workload::load_images(&lab);
    let disks = NODES.map(|node| SmallDisk::on(&lab, node, "small", "/tmp", "size=160m,mode=1777"));
    let args = ["env", IMAGE_GC, "srun", "-N3", "coracle", "run"];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    workload::start(&lab, &mut cluster);

    let mut problems = Vec::new();
    let mut tally = Tally::default();
    let mut before = check::long_running_pods(&lab, &mut cluster).expect("the workload runs");
    for (number, faults) in rounds.enumerate() {
        if tally.injected() >= wanted {
            break;
        }
        let descriptions: Vec<String> = faults.iter().map(Fault::to_string).collect();
        let description = format!("{}: {}", number + 1, descriptions.join("; "));
        println!("{description}");
        let start = Instant::now();
        let injected = inject(&lab, &mut cluster, &faults, number);
        for (_, missing) in &injected.missed {
            println!("  not injected: {missing}");
        }
        tally.count(&faults, &injected);
        match recover(&lab, &mut cluster, &faults, number, &before, &injected) {
            Ok(now) => {
                println!("  recovered and checked in {:.1?}", start.elapsed());
                before = now;
            }
            Err(problem) => {
                println!("  FAILED: {problem}\n{}", state(&lab, &mut cluster));
                problems.push(format!("{description}: {problem}"));
                // Continue, unless the cluster does not recover: further rounds may find more.
                workload::clean_up_round(&lab, &mut cluster, number);
                let now = check::long_running_pods(&lab, &mut cluster)
                    .and_then(|now| replace_restarted(&lab, &mut cluster, now, &faults));
                match now {
                    Ok(now) => before = now,
                    Err(problem) => {
                        problems.push(format!("the cluster did not recover: {problem}"));
                        break;
                    }
                }
            }
        }
    }
    println!("{tally}");
    assert!(problems.is_empty(), "{settings}:\n{}", problems.join("\n"));
    let injected = tally.injected();
    assert!(
        injected >= wanted,
        "{settings}: only {injected} faults were injected\n{tally}"
    );
    let never = tally.never_injected();
    assert!(never.is_empty(), "{settings}: never injected: {never:?}");

    cluster.exit(0);
    drop(disks);
    workload::clean_up(&lab);
    drop(registry);
    lab.assert_nothing_left();
}

/// Starts the pods of a round, and injects its faults.
fn inject(lab: &Lab, cluster: &mut TestCluster, faults: &[Fault], number: usize) -> Injected {
    workload::start_round(cluster, number);
    inject::inject(lab, cluster, faults, number)
}

/// Waits for recovery; returns the pods that run after the round.
fn recover(
    lab: &Lab,
    cluster: &mut TestCluster,
    faults: &[Fault],
    number: usize,
    before: &[LongRunningPod],
    injected: &Injected,
) -> Result<Vec<LongRunningPod>, String> {
    let now = check::check_round(lab, cluster, faults, number, before, injected)?;
    workload::clean_up_round(lab, cluster, number);
    replace_restarted(lab, cluster, now, faults)
}

/// Replaces pods that were restarted, so that the back-off never delays the next restart, and pods that lost both fork servers,
/// which only a new pod gets again. The StatefulSet's pods keep their volumes.
fn replace_restarted(
    lab: &Lab,
    cluster: &mut TestCluster,
    now: Vec<LongRunningPod>,
    faults: &[Fault],
) -> Result<Vec<LongRunningPod>, String> {
    let must_be_replaced = |pod: &&LongRunningPod| {
        pod.was_restarted() || model::lost_fork_servers(faults, pod.node, pod.target)
    };
    let restarted: Vec<_> = now.iter().filter(must_be_replaced).collect();
    if restarted.is_empty() {
        return Ok(now);
    }
    for pod in restarted {
        cluster.shell(&format!("kubectl delete pod {} --timeout=50s", pod.name));
        if pod.target == Target::Steady {
            cluster.create_objects(&[workload::steady_pod(pod.node)]);
        }
    }
    let replaced = check::long_running_pods(lab, cluster)?;
    check::volumes_are_kept(&now, &replaced)?;
    Ok(replaced)
}

/// The cluster's state, for debugging a failure.
fn state(lab: &Lab, cluster: &mut TestCluster) -> String {
    let mut state = String::new();
    let mut show = |title: &str, text: &str| {
        let lines: Vec<_> = text.lines().collect();
        let last = lines.len().saturating_sub(60);
        state += &format!("--- {title}\n{}\n", lines[last..].join("\n"));
    };
    for command in [
        "kubectl get nodes,pods,jobs --output=wide --request-timeout=10s",
        "kubectl get events --sort-by=.lastTimestamp --request-timeout=10s",
    ] {
        let (_, text) = cluster.try_shell(command);
        show(command, &text);
    }
    for node in NODES {
        let query = format!(
            "kubectl get --raw '/api/v1/nodes/{node}/proxy/logs/?query=kubelet' --request-timeout=10s"
        );
        let (_, text) = cluster.try_shell(&query);
        show(&format!("log of the kubelet of {node}"), &text);
        let listed = lab.root(
            node,
            "ps -ww -eo pid,ppid,user,stat,lstart,args | cut -c-180; ls -la /tmp; df /tmp",
        );
        show(&format!("processes of {node}"), &listed.stdout);
    }
    show("stderr of coracle run", &cluster.run.stderr());
    state
}
