//! Injects faults, and reverts those that last for a while.

use std::time::{Duration, Instant};

use e2e::{Lab, Process, Role, TestCluster, eventually};
use serde_json::Value;

use crate::fault::{
    Direction, Fault, FaultKind, NODES, PodProcess, PullKind, Target, Termination, Victim,
};
use crate::workload;

/// How long to wait for a victim in a pod: pods of Jobs come and go.
const POD_TIMEOUT: Duration = Duration::from_secs(20);
/// How long to wait for a victim that is a process of Coracle.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(4);
/// How long the replacement of a killed process may take during a fault.
const REPLACEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// How many pulls are started until one is found in progress.
const PULL_ATTEMPTS: usize = 3;
/// Time in which the agent removes the layers of an image that no pod uses, so that the next pull unpacks them again.
const GC_TIME: Duration = Duration::from_secs(3);
/// The address of the leader's host.
const LEADER: &str = "10.77.0.11";

/// Sends a signal to the process that pulls the image of a pod, this many seconds after it was found, and prints its pid. The
/// process is short-lived: a grandchild of the sandbox that holds the pod's lock, in the pid namespace of the host.
const SIGNAL_PULL: &str = r#"
import os, signal, sys, time
lock, number, delay = f"/pods/{sys.argv[1]}/lock", getattr(signal, sys.argv[2]), float(sys.argv[3])
def holds(pid):
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}").endswith(lock) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False
deadline = time.monotonic() + 12
while time.monotonic() < deadline:
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
            args = open(f"/proc/{pid}/cmdline").read().split("\0")
        except OSError:
            continue
        if args[1:3] == ["internal", "sandbox"] and len(status["NSpid"].split()) == 1:
            parents[pid] = status["PPid"].strip()
    for pid, parent in parents.items():
        if parent in parents and parents[parent] in parents and holds(parents[parent]):
            time.sleep(delay)
            try:
                os.kill(int(pid), number)
            except ProcessLookupError:
                continue
            print(pid)
            raise SystemExit
"#;

/// The effect of a round's faults.
#[derive(Debug, Default)]
pub struct Injected {
    /// The UIDs of Job pods of which a process was killed.
    pub killed_work: Vec<String>,
    /// For each fault that found no victim, its number and the reason.
    pub missed: Vec<(usize, String)>,
}

/// How to revert a fault.
enum Undo {
    Continue(&'static str, u32),
    EndPartition(&'static str, usize),
    FreeDisk(&'static str, usize),
}

/// Injects the faults of a round, each at its time, and returns when all have ended. The pods' termination begins after the faults
/// without a delay.
pub fn inject(lab: &Lab, cluster: &mut TestCluster, faults: &[Fault], round: usize) -> Injected {
    let mut injector = Injector {
        lab,
        cluster,
        round,
        began: Instant::now(),
        undos: Vec::new(),
        injected: Injected::default(),
    };
    let mut exit_requested = false;
    for (number, fault) in faults.iter().enumerate() {
        if !exit_requested && !fault.delay.is_zero() {
            workload::make_pods_exit(lab, round);
            exit_requested = true;
        }
        injector.revert_until(fault.delay);
        match injector.begin(number, fault) {
            Ok(undo) => injector
                .undos
                .extend(fault.end().zip(undo).map(|(end, undo)| (end, number, undo))),
            Err(missing) => injector.injected.missed.push((number, missing)),
        }
    }
    if !exit_requested {
        workload::make_pods_exit(lab, round);
    }
    while let Some(end) = injector.undos.iter().map(|(end, ..)| *end).min() {
        injector.revert_until(end);
    }
    injector.injected
}

struct Injector<'a> {
    lab: &'a Lab,
    cluster: &'a mut TestCluster,
    round: usize,
    began: Instant,
    /// When to revert, which fault, and how.
    undos: Vec<(Duration, usize, Undo)>,
    injected: Injected,
}

impl Injector<'_> {
    /// Begins a fault; an error if it found no victim.
    fn begin(&mut self, number: usize, fault: &Fault) -> Result<Option<Undo>, String> {
        match &fault.kind {
            FaultKind::Kill(victim) => {
                self.signal_victim(number, *victim, "KILL")?;
                Ok(None)
            }
            FaultKind::KillRepeatedly(victim, times) => {
                let mut last = 0;
                for _ in 0..*times {
                    let next = eventually(REPLACEMENT_TIMEOUT, || {
                        let (host, pid) = self.find(*victim).ok()?;
                        (pid != last).then_some((host, pid))
                    });
                    let (host, pid) = next.ok_or_else(|| format!("no replacement of {victim}"))?;
                    last = pid;
                    signal(self.lab, host, "KILL", pid)?;
                }
                Ok(None)
            }
            FaultKind::KillAtTermination(victim, Termination::Exit, after) => {
                let (host, pid) = self.find(*victim)?;
                let exit_file = format!("/home/user1/{}", workload::exit_file(self.round));
                let script = format!(
                    "install -o user1 /dev/null {exit_file} && sleep {} && {}",
                    after.as_secs_f64(),
                    signal_command("KILL", pid)
                );
                match self.lab.root(host, &script).code {
                    0 => Ok(None),
                    _ => Err(format!("{victim} has exited")),
                }
            }
            FaultKind::KillAtTermination(victim, Termination::Deletion, after) => {
                let node = victim.node();
                let name = workload::deleted_name(number, node);
                self.create(&workload::deleted_pod(number, node))?;
                self.cluster.wait_for(&name, "condition=Ready");
                let (host, pid) = self.find(*victim)?;
                self.cluster
                    .shell(&format!("kubectl delete pod {name} --wait=false"));
                std::thread::sleep(*after);
                signal(self.lab, host, "KILL", pid)?;
                Ok(None)
            }
            FaultKind::Stop(victim, _) => {
                // Stopping a process does not make its pod fail.
                let killed = self.injected.killed_work.len();
                let (host, pid) = self.signal_victim(number, *victim, "STOP")?;
                self.injected.killed_work.truncate(killed);
                Ok(Some(Undo::Continue(host, pid)))
            }
            FaultKind::Partition(node, direction, _) => {
                let script = format!(
                    "nft 'table inet fault{number} {{ {}; }}'",
                    chains(*direction)
                );
                self.lab.root(node, &script).succeeded();
                Ok(Some(Undo::EndPartition(node, number)))
            }
            FaultKind::FullDisk(node, _) => {
                let fill = format!("cat /dev/zero > /tmp/fill-{number}");
                let filled = self.lab.sh(&fill).user("user2").on(node).run();
                assert!(
                    filled.stderr.contains("No space left"),
                    "the disk of {node} is not full{filled}"
                );
                Ok(Some(Undo::FreeDisk(node, number)))
            }
        }
    }

    /// Sends a signal to a victim; returns its host and pid.
    fn signal_victim(
        &mut self,
        number: usize,
        victim: Victim,
        name: &str,
    ) -> Result<(&'static str, u32), String> {
        if let Victim::ImagePull(host, pull, after) = victim {
            let pid = self.signal_pull(number, host, pull, after, name)?;
            return Ok((host, pid));
        }
        let (host, pid) = self.find(victim)?;
        signal(self.lab, host, name, pid)?;
        Ok((host, pid))
    }

    /// Creates a pod whose image has to be pulled, and sends a signal to the process that pulls it.
    fn signal_pull(
        &mut self,
        number: usize,
        host: &'static str,
        pull: PullKind,
        after: Duration,
        name: &str,
    ) -> Result<u32, String> {
        let pod = workload::pulling_pod(number, host);
        let pod_name = workload::pull_name(number, host);
        for attempt in 0..PULL_ATTEMPTS {
            if attempt > 0 {
                let delete = format!("kubectl delete pod {pod_name} --timeout=50s");
                self.cluster.shell(&delete);
                std::thread::sleep(GC_TIME);
            }
            if pull == PullKind::Download {
                workload::forget_image(self.lab, number);
            }
            let uid = self.create(&pod)?;
            let seconds = after.as_secs_f64();
            let args = format!("{uid} SIG{name} {seconds}");
            let found = self
                .lab
                .root(host, &format!("/usr/bin/python3 -c '{SIGNAL_PULL}' {args}"));
            if let Ok(pid) = found.stdout.trim().parse() {
                return Ok(pid);
            }
        }
        Err(format!(
            "found no process that pulls the image of {pod_name}"
        ))
    }

    /// Creates a pod, with retries while the API server restarts; returns its UID.
    fn create(&mut self, pod: &Value) -> Result<String, String> {
        let command = format!(
            "kubectl create --validate=ignore --output=jsonpath={{.metadata.uid}} --filename=- <<'END OF OBJECT'\n{pod}\nEND OF OBJECT"
        );
        let mut output = String::new();
        let created = eventually(POD_TIMEOUT, || {
            let (code, text) = self.cluster.try_shell(&command);
            output = text;
            (code == 0).then_some(())
        });
        match created {
            Some(()) => Ok(output),
            None => Err(format!("cannot create a pod: {output}")),
        }
    }

    /// Finds the victim; returns its host and pid.
    fn find(&mut self, victim: Victim) -> Result<(&'static str, u32), String> {
        let timeout = match victim {
            Victim::Process(..) => PROCESS_TIMEOUT,
            _ => POD_TIMEOUT,
        };
        let found = eventually(timeout, || {
            self.revert_due();
            self.try_find(victim)
        });
        found.ok_or_else(|| format!("no {victim}"))
    }

    fn try_find(&mut self, victim: Victim) -> Option<(&'static str, u32)> {
        // On any node: the scheduler places the pods of Jobs, and a killed janitor is replaced only with the next guard of the
        // agent.
        let anywhere = match victim {
            Victim::Process(_, role) => role == Role::Janitor,
            Victim::Pod(_, target, _) => target == Target::Work,
            Victim::ImagePull(..) => false,
        };
        let others = NODES.iter().copied();
        let others = others.filter(|other| anywhere && *other != victim.node());
        let mut hosts = std::iter::once(victim.node()).chain(others);
        hosts.find_map(|host| {
            let pid = match victim {
                Victim::Process(_, role) => self.lab.try_find(host, "user1", role)?.pid,
                Victim::Pod(_, target, process) => self.process_of_pod(host, target, process)?,
                Victim::ImagePull(..) => return None,
            };
            Some((host, pid))
        })
    }

    fn process_of_pod(&mut self, host: &str, target: Target, wanted: PodProcess) -> Option<u32> {
        let all = self.lab.processes(host);
        let process = marked(&all, target.mark()).into_iter().next()?;
        let parent = |process: &Process| all.iter().find(|other| other.pid == process.parent);
        let inner = parent(process)?;
        let mut sandbox = inner;
        // The parent of the topmost sandbox process is the agent, its guard, or slurmstepd.
        while let Some(above) = parent(sandbox).filter(|above| is_sandbox(above)) {
            sandbox = above;
        }
        let is_fork_server = |other: &&Process| {
            other.parent == sandbox.pid && other.pid != inner.pid && is_sandbox(other)
        };
        let pid = match wanted {
            PodProcess::Container => process.pid,
            PodProcess::Inner => inner.pid,
            PodProcess::ForkServer => all.iter().find(is_fork_server)?.pid,
            PodProcess::Sandbox => sandbox.pid,
        };
        if target == Target::Work {
            let script = format!(
                "tr '\\0' '\\n' < /proc/{}/environ | sed -n s/^POD_UID=//p",
                process.pid
            );
            let uid = self.lab.root(host, &script).stdout.trim().to_owned();
            if uid.is_empty() {
                return None;
            }
            self.injected.killed_work.push(uid);
        }
        Some(pid)
    }

    /// Waits until this time since the beginning of the round, and reverts faults that end before.
    fn revert_until(&mut self, time: Duration) {
        loop {
            self.revert_due();
            let left = time.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                return;
            }
            let next = self.undos.iter().map(|(end, ..)| *end).min();
            let next = next.map(|end| end.saturating_sub(self.began.elapsed()));
            std::thread::sleep(next.map_or(left, |next| next.min(left)));
        }
    }

    /// Reverts the faults whose time is over.
    fn revert_due(&mut self) {
        let now = self.began.elapsed();
        let is_due = |(end, ..): &mut (Duration, usize, Undo)| *end <= now;
        for (_, number, undo) in self.undos.extract_if(.., is_due) {
            if let Err(missing) = revert(self.lab, &undo) {
                self.injected.missed.push((number, missing));
            }
        }
    }
}

/// Reverts a fault; an error if it had no effect.
fn revert(lab: &Lab, undo: &Undo) -> Result<(), String> {
    match undo {
        // Ignore errors: another fault may have killed the process.
        Undo::Continue(host, pid) => drop(lab.root(host, &format!("kill -CONT {pid}"))),
        Undo::EndPartition(host, number) => {
            let table = format!("table inet fault{number}");
            let script = format!("nft list {table} && nft delete {table}");
            let listed = lab.root(host, &script).succeeded().stdout;
            let counts = listed.split("counter packets ").skip(1);
            if !counts.into_iter().any(|count| !count.starts_with("0 ")) {
                return Err(format!("dropped no packet between {host} and the leader"));
            }
        }
        Undo::FreeDisk(host, number) => {
            lab.root(host, &format!("rm /tmp/fill-{number}"))
                .succeeded();
        }
    }
    Ok(())
}

/// nftables chains that drop packets and count them.
fn chains(direction: Direction) -> String {
    let chain = |name: &str, hook: &str, field: &str, verdict: &str| {
        format!(
            "chain {name} {{ type filter hook {hook} priority 0; ip {field} {LEADER} counter {verdict}; }}"
        )
    };
    let to = chain("to", "output", "daddr", "drop");
    let from = chain("from", "input", "saddr", "drop");
    let refuse = "reject with icmp type host-unreachable";
    let unreachable = chain("to", "output", "daddr", refuse);
    match direction {
        Direction::Both => format!("{to}; {from}"),
        Direction::ToLeader => to,
        Direction::FromLeader => from,
        Direction::Unreachable => unreachable,
    }
}

fn signal(lab: &Lab, host: &str, name: &str, pid: u32) -> Result<(), String> {
    let output = lab.root(host, &signal_command(name, pid));
    if output.code == 0 {
        Ok(())
    } else {
        Err(format!("{host}: process {pid} has exited"))
    }
}

/// kill(1) that also fails for zombies.
fn signal_command(name: &str, pid: u32) -> String {
    format!("! grep -qs '^State:[[:space:]]*[ZX]' /proc/{pid}/status && kill -{name} {pid}")
}

fn is_sandbox(process: &Process) -> bool {
    process.args.contains("internal sandbox")
}

/// The first processes of containers whose last argument is this mark. A child that a shell has just forked has the same arguments
/// and is excluded.
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
