//! The kinds of faults.

use std::fmt;
use std::time::Duration;

use e2e::Role;

/// The nodes of the cluster. The leader and the control plane are on the first.
pub const NODES: [&str; 3] = ["node1", "node2", "node3"];

/// A fault, and when it begins.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// Since the beginning of the round.
    pub delay: Duration,
    pub kind: Kind,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// SIGKILL.
    Kill(Victim),
    /// SIGKILL of a process, and of each replacement as soon as it exists, this many times.
    KillAgain(Victim, usize),
    /// SIGKILL while pods terminate, this long after their termination began.
    KillAtEnd(Victim, End, Duration),
    /// SIGSTOP, and SIGCONT after this time.
    Stop(Victim, Duration),
    /// Packets between this node and the leader's are dropped for this time.
    Cut(&'static str, Direction, Duration),
    /// Another user fills `/tmp` of this node for this time.
    FullDisk(&'static str, Duration),
}

/// How the termination of pods begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The pods of [`Target::Ends`] exit by themselves.
    Exit,
    /// The pod of [`Target::Deleted`] is deleted, and takes a second to terminate.
    Deletion,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Victim {
    /// A process of Coracle or of the control plane on this host.
    Part(&'static str, Role),
    /// The process that pulls an image on this host, this long after it was found.
    ImagePull(&'static str, Pull, Duration),
    /// A process of a pod on this host.
    Pod(&'static str, Target, Layer),
}

/// The work of an image pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pull {
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
pub enum Layer {
    Sandbox,
    /// The fork server of image pulls.
    Puller,
    Inner,
    /// The first process of the pod's first container.
    Process,
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
            Self::Part(node, _) | Self::ImagePull(node, ..) | Self::Pod(node, ..) => node,
        }
    }

    /// The victim's kind, regardless of its node.
    fn role(&self) -> String {
        match self {
            Self::Part(_, Role::Component(name)) => (*name).to_owned(),
            Self::Part(_, role) => format!("{role:?}"),
            Self::ImagePull(_, pull, _) => format!("the pull of an image ({pull:?})"),
            Self::Pod(_, _, layer) => format!("{layer:?} of a pod"),
        }
    }
}

impl Kind {
    /// The node that the fault affects.
    pub fn node(&self) -> &'static str {
        match self {
            Self::Kill(victim)
            | Self::KillAgain(victim, _)
            | Self::KillAtEnd(victim, ..)
            | Self::Stop(victim, _) => victim.node(),
            Self::Cut(node, ..) | Self::FullDisk(node, _) => node,
        }
    }

    /// A name that all faults of this kind share.
    pub fn name(&self) -> String {
        match self {
            Self::Kill(victim) => format!("kill {}", victim.role()),
            Self::KillAgain(victim, times) => format!("kill {} {times} times", victim.role()),
            Self::KillAtEnd(victim, End::Exit, _) => format!("kill {} at exit", victim.role()),
            Self::KillAtEnd(victim, End::Deletion, _) => {
                format!("kill {} at deletion", victim.role())
            }
            Self::Stop(victim, _) => format!("stop {}", victim.role()),
            Self::Cut(_, direction, _) => format!("cut the network ({direction:?})"),
            Self::FullDisk(..) => "fill the disk".to_owned(),
        }
    }
}

impl Fault {
    /// When the fault ends; `None` for kills.
    pub fn end(&self) -> Option<Duration> {
        match &self.kind {
            Kind::Kill(_) | Kind::KillAgain(..) | Kind::KillAtEnd(..) => None,
            Kind::Stop(_, time) | Kind::Cut(_, _, time) | Kind::FullDisk(_, time) => {
                Some(self.delay + *time)
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.delay.is_zero() {
            write!(f, "after {} ms ", self.delay.as_millis())?;
        }
        match &self.kind {
            Kind::Kill(victim) => write!(f, "kill {victim}"),
            Kind::KillAgain(victim, times) => write!(f, "kill {victim} {times} times"),
            Kind::KillAtEnd(victim, end, after) => {
                let after = after.as_millis();
                write!(f, "kill {victim} {after} ms after the {end:?} of pods")
            }
            Kind::Stop(victim, time) => write!(f, "stop {victim} for {} ms", time.as_millis()),
            Kind::Cut(node, direction, time) => {
                let which = match direction {
                    Direction::Both => "all packets",
                    Direction::ToLeader => "packets to the leader",
                    Direction::FromLeader => "packets from the leader",
                    Direction::Unreachable => "and refuse packets to the leader",
                };
                write!(f, "drop {which} at {node} for {} ms", time.as_millis())
            }
            Kind::FullDisk(node, time) => {
                write!(f, "fill the disk of {node} for {} ms", time.as_millis())
            }
        }
    }
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part(host, _) => write!(f, "{} on {host}", self.role()),
            Self::ImagePull(host, _, after) => {
                let after = after.as_millis();
                write!(f, "{} on {host}, {after} ms old", self.role())
            }
            Self::Pod(host, target, layer) => write!(f, "{layer:?} of {target:?} on {host}"),
        }
    }
}
