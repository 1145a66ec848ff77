//! What a fault is.

use std::fmt;
use std::time::Duration;

use e2e::Role;

/// The nodes of the cluster; the leader and the control plane are on the first.
pub const NODES: [&str; 3] = ["node1", "node2", "node3"];

/// One fault, and when it begins.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// After the round's beginning.
    pub delay: Duration,
    pub kind: Kind,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// SIGKILL.
    Kill(Victim),
    /// SIGKILL of a part, and of what replaces it as soon as that is there, so many times.
    KillAgain(Victim, usize),
    /// SIGKILL while pods end, so long after they were told to.
    KillAtEnd(Victim, End, Duration),
    /// SIGSTOP, and SIGCONT after a while.
    Stop(Victim, Duration),
    /// Packets between this node and the leader's are dropped for a while.
    Cut(&'static str, Direction, Duration),
    /// Another user fills `/tmp` of this node for a while.
    FullDisk(&'static str, Duration),
}

/// How pods end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The pods of [`Target::Ends`] exit by themselves.
    Exit,
    /// The pod of [`Target::Deleted`] is deleted, and takes a second to end.
    Deletion,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Victim {
    /// A part of Coracle or of the control plane on this host.
    Part(&'static str, Role),
    /// The process that pulls an image on this host, so long after it was found.
    ImagePull(&'static str, Pull, Duration),
    /// A process of a pod on this host.
    Pod(&'static str, Target, Layer),
}

/// What a pull of an image has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pull {
    /// The store has the image, and the node has to unpack it.
    Unpack,
    /// Also to fetch it from a registry.
    Download,
}

/// The pods that are attacked; each node has one of each, but for `Work`, which is where the scheduler puts it, and `Deleted`,
/// which is made for its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Restarted always, two containers, an emptyDir.
    Steady,
    /// Of a StatefulSet, with a local volume.
    Keeper,
    /// Never restarted, ends by itself with a code of its own.
    Ends,
    /// Of an Indexed Job.
    Work,
    /// Restarted always, until it is deleted.
    Deleted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    Sandbox,
    /// The process of which pulls of images are forked.
    Puller,
    Inner,
    /// The first process of the pod's first container.
    Process,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Both,
    /// Only what the node sends to the leader's host is dropped.
    ToLeader,
    /// Only what the leader's host sends to the node is dropped.
    FromLeader,
    /// Nothing is dropped silently: the kernel says that the leader's host can't be reached.
    Unreachable,
}

impl Victim {
    /// Where it is.
    pub fn node(&self) -> &'static str {
        match self {
            Self::Part(node, _) | Self::ImagePull(node, ..) | Self::Pod(node, ..) => node,
        }
    }

    /// What it is, wherever that is.
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
    /// Where it happens.
    pub fn node(&self) -> &'static str {
        match self {
            Self::Kill(victim)
            | Self::KillAgain(victim, _)
            | Self::KillAtEnd(victim, ..)
            | Self::Stop(victim, _) => victim.node(),
            Self::Cut(node, ..) | Self::FullDisk(node, _) => node,
        }
    }

    /// The same for all faults of this kind.
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
    /// When it is over; a kill at once.
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
