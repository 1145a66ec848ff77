//! Injects faults, and takes those back that last for a while.

use std::time::{Duration, Instant};

use e2e::{Cluster, Lab, Process, eventually};

use crate::plan::{Direction, Fault, Kind, Layer, NODES, Target, Victim};
use crate::workload::pull;

/// How long a victim may take to appear: pods of Jobs come and go.
const POD_TIMEOUT: Duration = Duration::from_secs(20);
/// The same for parts. The agents' srun need not be there: they outlive it.
const PART_TIMEOUT: Duration = Duration::from_secs(4);
/// What a part may take to be replaced, in the middle of a fault.
const NEXT_TIMEOUT: Duration = Duration::from_secs(30);
/// The address of the leader's host.
const LEADER: &str = "10.77.0.11";

/// Prints the pid of a process that pulls an image, which is there for a moment only: a fork of a fork of a sandbox in the pid
/// namespace of the host.
const FIND_PULL: &str = r#"
import os, time
end = time.monotonic() + 15
while time.monotonic() < end:
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
        except OSError:
            continue
        if words[1:3] == ["internal", "sandbox"] and len(status["NSpid"].split()) == 1:
            parents[pid] = status["PPid"].strip()
    for pid, parent in parents.items():
        if parent in parents and parents[parent] in parents:
            print(pid)
            raise SystemExit
"#;

/// What the faults of a round did.
#[derive(Debug, Default)]
pub struct Injected {
    /// The uids of pods of Jobs of which a process was killed.
    pub killed_work: Vec<String>,
    /// Victims that did not exist.
    pub missed: Vec<String>,
}

/// How to take a fault back.
enum Undo {
    Continue(&'static str, u32),
    Connect(&'static str, usize),
    FreeDisk(&'static str, usize),
}

/// Injects the faults of a round, each at its time, and returns when all are over. `amid` runs as soon as the first has begun.
pub fn inject(lab: &Lab, cluster: &mut Cluster, faults: &[Fault], amid: impl FnOnce()) -> Injected {
    let mut done = Injected::default();
    let mut undos: Vec<(Duration, Undo)> = Vec::new();
    let mut amid = Some(amid);
    let began = Instant::now();
    for (number, fault) in faults.iter().enumerate() {
        wait_for(began + fault.delay);
        match begin(lab, cluster, number, fault, &mut done) {
            Ok(undo) => undos.extend(fault.end().zip(undo)),
            Err(missing) => done.missed.push(missing),
        }
        if let Some(amid) = amid.take() {
            amid();
        }
    }
    undos.sort_by_key(|(end, _)| *end);
    for (end, undo) in undos {
        wait_for(began + end);
        take_back(lab, &undo);
    }
    done
}

fn wait_for(time: Instant) {
    std::thread::sleep(time.saturating_duration_since(Instant::now()));
}

fn begin(
    lab: &Lab,
    cluster: &mut Cluster,
    number: usize,
    fault: &Fault,
    done: &mut Injected,
) -> Result<Option<Undo>, String> {
    match &fault.kind {
        Kind::Kill(victim) => {
            let (host, pid) = find(lab, cluster, *victim, done)?;
            signal(lab, host, "KILL", pid)?;
            Ok(None)
        }
        Kind::KillAgain(victim, times) => {
            let mut last = 0;
            for _ in 0..*times {
                let next = eventually(NEXT_TIMEOUT, || {
                    let (host, pid) = find(lab, cluster, *victim, done).ok()?;
                    (pid != last).then_some((host, pid))
                });
                let (host, pid) = next.ok_or_else(|| format!("no next {victim}"))?;
                last = pid;
                signal(lab, host, "KILL", pid)?;
            }
            Ok(None)
        }
        Kind::Stop(victim, _) => {
            // A process that is stopped fails nothing.
            let (host, pid) = find(lab, cluster, *victim, &mut Injected::default())?;
            signal(lab, host, "STOP", pid)?;
            Ok(Some(Undo::Continue(host, pid)))
        }
        Kind::Cut(node, direction, _) => {
            let chain = |name: &str, hook: &str, field: &str, verdict: &str| {
                format!(
                    "chain {name} {{ type filter hook {hook} priority 0; ip {field} {LEADER} {verdict}; }}"
                )
            };
            let to = chain("to", "output", "daddr", "drop");
            let from = chain("from", "input", "saddr", "drop");
            let refuse = "reject with icmp type host-unreachable";
            let unreachable = chain("to", "output", "daddr", refuse);
            let rules = match direction {
                Direction::Both => format!("{to}; {from}"),
                Direction::ToLeader => to,
                Direction::FromLeader => from,
                Direction::Unreachable => unreachable,
            };
            let script = format!("nft 'table inet fault{number} {{ {rules}; }}'");
            lab.root(node, &script).succeeded();
            Ok(Some(Undo::Connect(node, number)))
        }
        Kind::FullDisk(node, _) => {
            let fill = format!("cat /dev/zero > /tmp/fill-{number}");
            let filled = lab.sh(&fill).user("user2").on(node).run();
            assert!(
                filled.stderr.contains("No space left"),
                "the disk of {node} is not full{filled}"
            );
            Ok(Some(Undo::FreeDisk(node, number)))
        }
    }
}

fn take_back(lab: &Lab, undo: &Undo) {
    match undo {
        // Another fault may have killed it.
        Undo::Continue(host, pid) => drop(lab.root(host, &format!("kill -CONT {pid}"))),
        Undo::Connect(host, number) => {
            let script = format!("nft delete table inet fault{number}");
            lab.root(host, &script).succeeded();
        }
        Undo::FreeDisk(host, number) => {
            lab.root(host, &format!("rm /tmp/fill-{number}"))
                .succeeded();
        }
    }
}

fn signal(lab: &Lab, host: &str, name: &str, pid: u32) -> Result<(), String> {
    let output = lab.root(host, &format!("kill -{name} {pid}"));
    if output.code == 0 {
        Ok(())
    } else {
        Err(format!("{host}: process {pid} has ended"))
    }
}

/// The victim's host and pid.
fn find(
    lab: &Lab,
    cluster: &mut Cluster,
    victim: Victim,
    done: &mut Injected,
) -> Result<(&'static str, u32), String> {
    match victim {
        Victim::Part(host, role) => {
            let found = eventually(PART_TIMEOUT, || lab.try_find(host, "user1", role));
            let found = found.ok_or_else(|| format!("no {victim}"))?;
            Ok((host, found.pid))
        }
        Victim::ImagePull(host) => {
            cluster.create_objects(&[pull(host)]);
            let found = lab.root(host, &format!("/usr/bin/python3 -c '{FIND_PULL}'"));
            let pid = found.stdout.trim().parse();
            Ok((host, pid.map_err(|_| format!("no {victim}"))?))
        }
        Victim::Pod(host, target, layer) => {
            let found = eventually(POD_TIMEOUT, || {
                // The scheduler chooses the nodes of Jobs' pods.
                let others = NODES.iter().filter(|other| **other != host);
                let others = others.filter(|_| target == Target::Work);
                std::iter::once(&host)
                    .chain(others)
                    .find_map(|host| Some((*host, of_pod(lab, host, target, layer, done)?)))
            });
            found.ok_or_else(|| format!("no {victim}"))
        }
    }
}

fn of_pod(lab: &Lab, host: &str, target: Target, layer: Layer, done: &mut Injected) -> Option<u32> {
    let all = lab.processes(host);
    let process = marked(&all, target.mark()).into_iter().next()?;
    let parent = |process: &Process| all.iter().find(|other| other.pid == process.parent);
    let inner = parent(process)?;
    let mut sandbox = inner;
    // Above it are the agent, or the agent's guard, and Slurm's.
    while let Some(above) = parent(sandbox).filter(|above| is_sandbox(above)) {
        sandbox = above;
    }
    let is_puller = |other: &&Process| {
        other.parent == sandbox.pid && other.pid != inner.pid && is_sandbox(other)
    };
    let pid = match layer {
        Layer::Process => process.pid,
        Layer::Inner => inner.pid,
        Layer::Puller => all.iter().find(is_puller)?.pid,
        Layer::Sandbox => sandbox.pid,
    };
    if target == Target::Work {
        let script = format!(
            "tr '\\0' '\\n' < /proc/{}/environ | sed -n s/^POD_UID=//p",
            process.pid
        );
        let uid = lab.root(host, &script).stdout.trim().to_owned();
        // It has ended meanwhile.
        if uid.is_empty() {
            return None;
        }
        done.killed_work.push(uid);
    }
    Some(pid)
}

fn is_sandbox(process: &Process) -> bool {
    process.args.contains("internal sandbox")
}

/// The first processes of containers with this mark as their last argument. A shell that has just forked has the same arguments
/// as its child.
pub fn marked<'a>(all: &'a [Process], mark: &str) -> Vec<&'a Process> {
    let has = |process: &&Process| process.args.ends_with(mark) && process.args.starts_with("sh ");
    let is_child = |process: &Process| {
        let mut marked = all.iter().filter(has);
        marked.any(|other| other.pid == process.parent)
    };
    all.iter()
        .filter(has)
        .filter(|process| !is_child(process))
        .collect()
}
