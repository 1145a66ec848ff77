//! The kinds of faults.

use std::fmt;
use std::time::Duration;

use e2e::Role;

/// The nodes of the cluster. The leader and the control plane are on the first.
pub const NODES: [&str; 3] = ["node1", "node2", "node3"];

/// A fault and its start.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// Since the beginning of the round.
    pub delay: Duration,
    pub kind: FaultKind,
}

#[derive(Debug, Clone, PartialEq)]
pub enum FaultKind {
    /// SIGKILL.
    Kill(Victim),
    /// SIGKILL of a process, and of each of its replacements, this many times.
    KillRepeatedly(Victim, usize),
    /// SIGKILL while pods terminate, this long after the start of their termination.
    KillAtTermination(Victim, Termination, Duration),
    /// SIGSTOP, and SIGCONT after this time.
    Stop(Victim, Duration),
    /// Packets between this node and the leader's are dropped for this time.
    Partition(&'static str, Direction, Duration),
    /// Another user fills `/tmp` of this node for this time.
    FullDisk(&'static str, Duration),
}

/// The cause of the termination of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Termination {
    /// The pods of [`Target::Ends`] exit by themselves.
    Exit,
    /// The pod of [`Target::Deleted`] is deleted, and takes a second to terminate.
    Deletion,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Victim {
    /// A process of Coracle or of the control plane on this host.
    Process(&'static str, Role),
    /// The process that pulls an image on this host, this long after it was found.
    ImagePull(&'static str, PullKind, Duration),
    /// A process of a pod on this host.
    Pod(&'static str, Target, PodProcess),
}

/// The kinds of image pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullKind {
    /// The store has the image. The node has to unpack it.
    Unpack,
    /// The image has to be downloaded from a registry, too.
    Download,
}

/// Kinds of pods that faults hit. Each node has one of each, with two exceptions: the scheduler places `Work`, and `Deleted` is
/// created for its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Policy Always, with two containers and an emptyDir.
    Steady,
    /// In a StatefulSet, with a local volume.
    Keeper,
    /// Policy Never; exits with a code of its own.
    Ends,
    /// In an Indexed Job.
    Work,
    /// Policy Always, until it is deleted.
    Deleted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodProcess {
    Sandbox,
    /// The fork server of image pulls.
    ForkServer,
    Inner,
    /// The first process of the pod's first container.
    Container,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Both,
    /// Only packets from the node to the leader's host are dropped.
    ToLeader,
    /// Only packets from the leader's host to the node are dropped.
    FromLeader,
    /// Packets are rejected: the kernel reports that the leader's host is unreachable.
    Unreachable,
}

impl Victim {
    /// The victim's node.
    pub fn node(&self) -> &'static str {
        match self {
            Self::Process(node, _) | Self::ImagePull(node, ..) | Self::Pod(node, ..) => node,
        }
    }

    /// The victim's kind, regardless of its node.
    fn kind(&self) -> String {
        match self {
            Self::Process(_, Role::Component(name)) => (*name).to_owned(),
            Self::Process(_, role) => format!("{role:?}"),
            Self::ImagePull(_, pull, _) => format!("image pull ({pull:?})"),
            Self::Pod(_, _, process) => format!("{process:?} of a pod"),
        }
    }
}

impl FaultKind {
    /// The node that the fault affects.
    pub fn node(&self) -> &'static str {
        match self {
            Self::Kill(victim)
            | Self::KillRepeatedly(victim, _)
            | Self::KillAtTermination(victim, ..)
            | Self::Stop(victim, _) => victim.node(),
            Self::Partition(node, ..) | Self::FullDisk(node, _) => node,
        }
    }

    /// A name that all faults of this kind share.
    pub fn name(&self) -> String {
        match self {
            Self::Kill(victim) => format!("kill {}", victim.kind()),
            Self::KillRepeatedly(victim, times) => format!("kill {} {times} times", victim.kind()),
            Self::KillAtTermination(victim, Termination::Exit, _) => {
                format!("kill {} at exit", victim.kind())
            }
            Self::KillAtTermination(victim, Termination::Deletion, _) => {
                format!("kill {} at deletion", victim.kind())
            }
            Self::Stop(victim, _) => format!("stop {}", victim.kind()),
            Self::Partition(_, direction, _) => format!("network partition ({direction:?})"),
            Self::FullDisk(..) => "fill the disk".to_owned(),
        }
    }
}

impl Fault {
    /// When the fault ends; `None` for kills.
    pub fn end(&self) -> Option<Duration> {
        match &self.kind {
            FaultKind::Kill(_)
            | FaultKind::KillRepeatedly(..)
            | FaultKind::KillAtTermination(..) => None,
            FaultKind::Stop(_, time)
            | FaultKind::Partition(_, _, time)
            | FaultKind::FullDisk(_, time) => Some(self.delay + *time),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.delay.is_zero() {
            write!(f, "after {} ms ", self.delay.as_millis())?;
        }
        match &self.kind {
            FaultKind::Kill(victim) => write!(f, "kill {victim}"),
            FaultKind::KillRepeatedly(victim, times) => write!(f, "kill {victim} {times} times"),
            FaultKind::KillAtTermination(victim, end, after) => {
                let after = after.as_millis();
                write!(f, "kill {victim} {after} ms after the {end:?} of pods")
            }
            FaultKind::Stop(victim, time) => write!(f, "stop {victim} for {} ms", time.as_millis()),
            FaultKind::Partition(node, direction, time) => {
                let packets = match direction {
                    Direction::Both => "all packets",
                    Direction::ToLeader => "packets to the leader",
                    Direction::FromLeader => "packets from the leader",
                    Direction::Unreachable => "and refuse packets to the leader",
                };
                write!(f, "drop {packets} at {node} for {} ms", time.as_millis())
            }
            FaultKind::FullDisk(node, time) => {
                write!(f, "fill the disk of {node} for {} ms", time.as_millis())
            }
        }
    }
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(host, _) => write!(f, "{} on {host}", self.kind()),
            Self::ImagePull(host, _, after) => {
                let after = after.as_millis();
                write!(f, "{} on {host}, {after} ms old", self.kind())
            }
            Self::Pod(host, target, process) => write!(f, "{process:?} of {target:?} on {host}"),
        }
    }
}
