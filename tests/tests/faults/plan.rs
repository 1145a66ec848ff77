//! Which faults a run injects: a pure function of its seed.

use std::fmt;
use std::time::Duration;

use e2e::Role;

/// The nodes of the cluster; the leader and the control plane are on the first.
pub const NODES: [&str; 3] = ["node1", "node2", "node3"];

/// The longest delay between the two faults of a pair.
const MAX_DELAY_MS: u64 = 2000;

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
    /// SIGSTOP, and SIGCONT after a while.
    Stop(Victim, Duration),
    /// Packets between this node and the leader's are dropped for a while.
    Cut(&'static str, Direction, Duration),
    /// Another user fills `/tmp` of this node for a while.
    FullDisk(&'static str, Duration),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Victim {
    /// A part of Coracle or of the control plane on this host.
    Part(&'static str, Role),
    /// The process that pulls an image on this host.
    ImagePull(&'static str),
    /// A process of a pod on this host.
    Pod(&'static str, Target, Layer),
}

/// The pods that are attacked; each node has one of each, but for `Work`, which is where the scheduler puts it.
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

/// The rounds of a run: one fault or a pair of them in each. No fault lasts longer than `longest`.
pub fn rounds(seed: u64, count: usize, longest: Duration) -> Vec<Vec<Fault>> {
    let mut random = Random {
        state: seed,
        here: None,
    };
    let mut deck = Vec::new();
    let mut draw = |random: &mut Random| {
        // Every kind comes once before any comes again.
        if deck.is_empty() {
            deck = kinds();
            random.shuffle(&mut deck);
        }
        let kind = deck.pop().expect("there are kinds of faults");
        kind(random, longest)
    };
    let mut rounds = Vec::new();
    for _ in 0..count {
        let first = Fault {
            delay: Duration::ZERO,
            kind: draw(&mut random),
        };
        let mut round = vec![first];
        if random.below(3) == 0 {
            // Half of all pairs hit one node.
            random.here = (random.below(2) == 0).then(|| round[0].kind.node());
            let at_once = random.below(2) == 0;
            let delay = if at_once {
                0
            } else {
                random.below(MAX_DELAY_MS)
            };
            round.push(Fault {
                delay: Duration::from_millis(delay),
                kind: draw(&mut random),
            });
            random.here = None;
        }
        rounds.push(round);
    }
    rounds
}

/// Fills in what a kind leaves open.
type Draw = fn(&mut Random, Duration) -> Kind;

fn kinds() -> Vec<Draw> {
    vec![
        |random, _| Kind::Kill(random.part(Role::Agent)),
        |random, _| Kind::Kill(random.part(Role::AgentGuard)),
        |random, _| Kind::Kill(random.part(Role::Hub)),
        |random, _| Kind::Kill(random.part(Role::HubGuard)),
        |random, _| Kind::Kill(random.part(Role::Janitor)),
        |random, _| Kind::KillAgain(random.part(Role::Agent), AGAIN),
        |random, _| Kind::KillAgain(random.part(Role::Hub), AGAIN),
        |_, _| Kind::Kill(of_leader(Role::AgentSrun)),
        |_, _| Kind::Kill(of_leader(Role::Component("etcd"))),
        |_, _| Kind::Kill(of_leader(Role::Component("kube-apiserver"))),
        |_, _| Kind::Kill(of_leader(Role::Component("kube-scheduler"))),
        |_, _| Kind::Kill(of_leader(Role::Component("kube-controller-manager"))),
        |random, _| Kind::Kill(Victim::ImagePull(random.node())),
        |random, _| Kind::Kill(random.pod(Layer::Sandbox)),
        |random, _| Kind::Kill(random.pod(Layer::Puller)),
        |random, _| Kind::Kill(random.pod(Layer::Inner)),
        |random, _| Kind::Kill(random.pod(Layer::Process)),
        |random, longest| Kind::Stop(random.part(Role::Agent), random.time(longest)),
        |random, longest| Kind::Stop(random.part(Role::AgentGuard), random.time(longest)),
        |random, longest| Kind::Stop(random.part(Role::Hub), random.time(longest)),
        |random, longest| Kind::Stop(random.part(Role::HubGuard), random.time(longest)),
        |random, longest| Kind::Stop(random.part(Role::Janitor), random.time(longest)),
        |random, longest| Kind::Stop(of_leader(Role::AgentSrun), random.time(longest)),
        |random, longest| {
            let roles = [
                Role::LeaderGuard,
                Role::LeaderWorker,
                Role::ControlPlaneOuter,
                Role::ControlPlaneFirst,
            ];
            Kind::Stop(of_leader(random.choose(&roles)), random.time(longest))
        },
        |random, longest| {
            let names = [
                "etcd",
                "kube-apiserver",
                "kube-scheduler",
                "kube-controller-manager",
            ];
            let victim = of_leader(Role::Component(random.choose(&names)));
            Kind::Stop(victim, random.time(longest))
        },
        |random, longest| Kind::Stop(Victim::ImagePull(random.node()), random.time(longest)),
        |random, longest| Kind::Stop(random.pod(Layer::Sandbox), random.time(longest)),
        |random, longest| Kind::Stop(random.pod(Layer::Puller), random.time(longest)),
        |random, longest| Kind::Stop(random.pod(Layer::Inner), random.time(longest)),
        |random, longest| Kind::Stop(random.pod(Layer::Process), random.time(longest)),
        |random, longest| Kind::Cut(random.other_node(), Direction::Both, random.time(longest)),
        |random, longest| {
            Kind::Cut(
                random.other_node(),
                Direction::ToLeader,
                random.time(longest),
            )
        },
        |random, longest| {
            Kind::Cut(
                random.other_node(),
                Direction::FromLeader,
                random.time(longest),
            )
        },
        |random, longest| {
            Kind::Cut(
                random.other_node(),
                Direction::Unreachable,
                random.time(longest),
            )
        },
        |random, longest| Kind::FullDisk(random.node(), random.time(longest.min(DISK_LONGEST))),
    ]
}

/// More often than a supervisor might take for a crash loop.
const AGAIN: usize = 6;
/// After half a minute of a full disk, the kubelet evicts pods.
const DISK_LONGEST: Duration = Duration::from_secs(15);

fn of_leader(role: Role) -> Victim {
    Victim::Part(NODES[0], role)
}

/// `SplitMix64`: small, and the same on every machine and in every release.
struct Random {
    state: u64,
    /// Where the next fault happens, if that is decided.
    here: Option<&'static str>,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        let index = self.below(from.len() as u64);
        from[usize::try_from(index).unwrap_or_default()]
    }

    fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            let other = self.below(last as u64 + 1);
            all.swap(last, usize::try_from(other).unwrap_or_default());
        }
    }

    fn node(&mut self) -> &'static str {
        let chosen = self.choose(&NODES);
        self.here.unwrap_or(chosen)
    }

    /// Not the leader's own.
    fn other_node(&mut self) -> &'static str {
        let chosen = self.choose(&NODES[1..]);
        self.here.filter(|node| *node != NODES[0]).unwrap_or(chosen)
    }

    fn part(&mut self, role: Role) -> Victim {
        Victim::Part(self.node(), role)
    }

    fn pod(&mut self, layer: Layer) -> Victim {
        let targets = [Target::Steady, Target::Keeper, Target::Ends, Target::Work];
        Victim::Pod(self.node(), self.choose(&targets), layer)
    }

    /// At least two seconds.
    fn time(&mut self, longest: Duration) -> Duration {
        let most = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(2000 + self.below(most.saturating_sub(2000).max(1)))
    }
}

impl Kind {
    fn node(&self) -> &'static str {
        match self {
            Self::Kill(victim) | Self::KillAgain(victim, _) | Self::Stop(victim, _) => match victim
            {
                Victim::Part(node, _) | Victim::ImagePull(node) | Victim::Pod(node, ..) => node,
            },
            Self::Cut(node, ..) | Self::FullDisk(node, _) => node,
        }
    }
}

impl Fault {
    /// When it is over; a kill at once.
    pub fn end(&self) -> Option<Duration> {
        match &self.kind {
            Kind::Kill(_) | Kind::KillAgain(..) => None,
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
            Self::Part(host, Role::Component(name)) => write!(f, "{name} on {host}"),
            Self::Part(host, role) => write!(f, "{role:?} on {host}"),
            Self::ImagePull(host) => write!(f, "the pull of an image on {host}"),
            Self::Pod(host, target, layer) => write!(f, "{layer:?} of {target:?} on {host}"),
        }
    }
}

#[test]
fn a_seed_always_chooses_the_same_faults() {
    let longest = Duration::from_secs(30);
    let plan = rounds(7, 300, longest);
    assert_eq!(plan, rounds(7, 300, longest));
    assert_ne!(plan, rounds(8, 300, longest));
    assert_eq!(plan[..10], rounds(7, 10, longest)[..]);
    let pairs = plan.iter().filter(|round| round.len() == 2).count();
    assert!((60..150).contains(&pairs), "{pairs}");
    let cuts = plan.iter().flatten();
    let cuts: Vec<_> = cuts
        .filter_map(|fault| match fault.kind {
            Kind::Cut(_, _, time) => Some(time),
            _ => None,
        })
        .collect();
    assert!(cuts.iter().any(|time| time.as_secs() >= 25), "{cuts:?}");
}
