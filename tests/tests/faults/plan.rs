//! Chooses the faults of a run: a pure function of its seed.

use std::time::Duration;

use e2e::Role;

use crate::fault::{Direction, End, Fault, Kind, Layer, NODES, Pull, Target, Victim};

/// The maximum delay between two faults that are meant to overlap.
const MAX_DELAY_MS: u64 = 2000;
/// The delay of a second fault that hits a cluster which has already recovered from the first.
const LATE_MS: u64 = 8000;

/// The rounds of a run: an infinite iterator. Each has one fault or two.
pub struct Rounds {
    random: Random,
    deck: Vec<Card>,
    longest: Duration,
}

/// The rounds for a seed. No fault lasts longer than `longest`.
pub fn rounds(seed: u64, longest: Duration) -> Rounds {
    Rounds {
        random: Random {
            state: seed,
            here: None,
            late: false,
        },
        deck: Vec::new(),
        longest,
    }
}

impl Iterator for Rounds {
    type Item = Vec<Fault>;

    fn next(&mut self) -> Option<Vec<Fault>> {
        let card = self.draw(|_| true);
        let (random, longest) = (&mut self.random, self.longest);
        let now = |kind| Fault {
            delay: Duration::ZERO,
            kind,
        };
        let first = match card {
            Card::Any(draw) | Card::First(draw) => now(draw(random, longest)),
            Card::LatePair(draw) => {
                let [first, second] = draw(random, longest);
                let delay = Duration::from_millis(LATE_MS);
                return Some(vec![
                    now(first),
                    Fault {
                        delay,
                        kind: second,
                    },
                ]);
            }
        };
        if self.random.below(3) > 0 {
            return Some(vec![first]);
        }
        // Half of all pairs are on one node.
        self.random.here = (self.random.below(2) == 0).then(|| first.kind.node());
        let delay = match self.random.below(3) {
            0 => 0,
            1 => self.random.below(MAX_DELAY_MS),
            _ => LATE_MS,
        };
        self.random.late = delay == LATE_MS;
        let second = match self.draw(|card| matches!(card, Card::Any(_))) {
            Card::Any(draw) | Card::First(draw) => draw(&mut self.random, self.longest),
            Card::LatePair(_) => unreachable!("not a second fault"),
        };
        self.random.here = None;
        self.random.late = false;
        let second = Fault {
            delay: Duration::from_millis(delay),
            kind: second,
        };
        Some(vec![first, second])
    }
}

impl Rounds {
    /// Takes the uppermost card that is `usable`. Every kind is used once before any is repeated.
    fn draw(&mut self, usable: fn(&Card) -> bool) -> Card {
        loop {
            if let Some(index) = self.deck.iter().rposition(usable) {
                return self.deck.remove(index);
            }
            let mut below = kinds();
            self.random.shuffle(&mut below);
            below.append(&mut self.deck);
            self.deck = below;
        }
    }
}

/// A kind of fault. The function chooses the remaining parameters at random.
enum Card {
    /// Alone, or in a pair with any other.
    Any(Draw<Kind>),
    /// Never the second of a pair, because it needs pods that the first fault may have prevented from running or terminating.
    First(Draw<Kind>),
    /// A pair of which the second fault comes after the cluster has recovered from the first.
    LatePair(Draw<[Kind; 2]>),
}

type Draw<T> = fn(&mut Random, Duration) -> T;

fn kinds() -> Vec<Card> {
    use Card::{Any, First, LatePair};
    use Kind::{Cut, FullDisk, Kill, KillAgain, KillAtEnd, Stop};
    vec![
        Any(|random, _| Kill(random.part(Role::Agent))),
        Any(|random, _| Kill(random.part(Role::AgentGuard))),
        Any(|random, _| Kill(random.part(Role::Hub))),
        Any(|random, _| Kill(random.part(Role::HubGuard))),
        Any(|random, _| Kill(random.part(Role::Janitor))),
        Any(|random, _| KillAgain(random.part(Role::Agent), AGAIN)),
        Any(|random, _| KillAgain(random.part(Role::Hub), AGAIN)),
        Any(|_, _| Kill(of_leader(Role::Component("etcd")))),
        Any(|_, _| Kill(of_leader(Role::Component("kube-apiserver")))),
        Any(|_, _| Kill(of_leader(Role::Component("kube-scheduler")))),
        Any(|_, _| Kill(of_leader(Role::Component("kube-controller-manager")))),
        First(|random, _| Kill(random.pull(Pull::Unpack))),
        First(|random, _| Kill(random.pull(Pull::Download))),
        Any(|random, _| Kill(random.pod(Layer::Sandbox))),
        Any(|random, _| Kill(random.pod(Layer::Puller))),
        Any(|random, _| Kill(random.pod(Layer::Inner))),
        Any(|random, _| Kill(random.pod(Layer::Process))),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Ends, Layer::Sandbox);
            KillAtEnd(victim, End::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Ends, Layer::Inner);
            KillAtEnd(victim, End::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let agent = random.part(Role::Agent);
            KillAtEnd(agent, End::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let guard = random.part(Role::AgentGuard);
            KillAtEnd(guard, End::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let server = of_leader(Role::Component("kube-apiserver"));
            KillAtEnd(server, End::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Deleted, Layer::Sandbox);
            KillAtEnd(victim, End::Deletion, random.up_to(DELETION_MS))
        }),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Deleted, Layer::Inner);
            KillAtEnd(victim, End::Deletion, random.up_to(DELETION_MS))
        }),
        First(|random, _| {
            let agent = random.part(Role::Agent);
            KillAtEnd(agent, End::Deletion, random.up_to(DELETION_MS))
        }),
        First(|random, _| {
            let guard = random.part(Role::AgentGuard);
            KillAtEnd(guard, End::Deletion, random.up_to(DELETION_MS))
        }),
        LatePair(|random, _| random.one_after_the_other(Role::HubGuard, Role::Hub)),
        LatePair(|random, _| random.one_after_the_other(Role::Hub, Role::HubGuard)),
        LatePair(|random, _| random.one_after_the_other(Role::AgentGuard, Role::Agent)),
        LatePair(|random, _| random.one_after_the_other(Role::Agent, Role::AgentGuard)),
        // After the first kill, the leader starts a new agent by srun. The agent must not depend on that srun.
        LatePair(|random, _| {
            let guard = random.part(Role::AgentGuard);
            [Kill(guard), Kill(of_leader(Role::AgentSrun))]
        }),
        LatePair(|random, longest| {
            let guard = random.part(Role::AgentGuard);
            let srun = of_leader(Role::AgentSrun);
            [Kill(guard), Stop(srun, random.time(longest))]
        }),
        Any(|random, longest| Stop(random.part(Role::Agent), random.time(longest))),
        Any(|random, longest| Stop(random.part(Role::AgentGuard), random.time(longest))),
        Any(|random, longest| Stop(random.part(Role::Hub), random.time(longest))),
        Any(|random, longest| Stop(random.part(Role::HubGuard), random.time(longest))),
        Any(|random, longest| Stop(random.part(Role::Janitor), random.time(longest))),
        Any(|random, longest| random.stop_of_leader(Role::LeaderGuard, longest)),
        Any(|random, longest| random.stop_of_leader(Role::LeaderWorker, longest)),
        Any(|random, longest| random.stop_of_leader(Role::ControlPlaneOuter, longest)),
        Any(|random, longest| random.stop_of_leader(Role::ControlPlaneFirst, longest)),
        Any(|random, longest| random.stop_of_leader(Role::Component("etcd"), longest)),
        Any(|random, longest| random.stop_of_leader(Role::Component("kube-apiserver"), longest)),
        Any(|random, longest| random.stop_of_leader(Role::Component("kube-scheduler"), longest)),
        Any(|random, longest| {
            random.stop_of_leader(Role::Component("kube-controller-manager"), longest)
        }),
        First(|random, longest| Stop(random.pull(Pull::Unpack), random.time(longest))),
        First(|random, longest| Stop(random.pull(Pull::Download), random.time(longest))),
        Any(|random, longest| Stop(random.pod(Layer::Sandbox), random.time(longest))),
        Any(|random, longest| Stop(random.pod(Layer::Puller), random.time(longest))),
        Any(|random, longest| Stop(random.pod(Layer::Inner), random.time(longest))),
        Any(|random, longest| Stop(random.pod(Layer::Process), random.time(longest))),
        Any(|random, longest| Cut(random.other_node(), Direction::Both, random.time(longest))),
        Any(|random, longest| {
            let node = random.other_node();
            Cut(node, Direction::ToLeader, random.time(longest))
        }),
        Any(|random, longest| {
            let node = random.other_node();
            Cut(node, Direction::FromLeader, random.time(longest))
        }),
        Any(|random, longest| {
            let node = random.other_node();
            Cut(node, Direction::Unreachable, random.time(longest))
        }),
        Any(|random, longest| FullDisk(random.node(), random.time(longest.min(DISK_LONGEST)))),
    ]
}

/// More kills than a supervisor might take for a crash loop.
const AGAIN: usize = 6;
/// Less than the half minute after which the kubelet evicts pods from a full disk.
const DISK_LONGEST: Duration = Duration::from_secs(15);
/// Within this time, pods of [`Target::Ends`] have exited.
const EXIT_MS: u64 = 300;
/// Within this time, the pod of [`Target::Deleted`] has terminated. Agents may be hit later, too.
const DELETION_MS: u64 = 1000;
/// The minimum duration of a pull.
const PULL_MS: u64 = 100;

fn of_leader(role: Role) -> Victim {
    Victim::Part(NODES[0], role)
}

/// `SplitMix64`: small, and the same on every machine and in every release.
struct Random {
    state: u64,
    /// The node of the next fault, if it is already chosen.
    here: Option<&'static str>,
    /// Whether the next fault comes when only the pods that run during all rounds are left.
    late: bool,
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

    /// Any node but the leader's.
    fn other_node(&mut self) -> &'static str {
        let chosen = self.choose(&NODES[1..]);
        self.here.filter(|node| *node != NODES[0]).unwrap_or(chosen)
    }

    fn part(&mut self, role: Role) -> Victim {
        Victim::Part(self.node(), role)
    }

    fn pod(&mut self, layer: Layer) -> Victim {
        let targets = [Target::Steady, Target::Keeper, Target::Ends, Target::Work];
        let there = if self.late { &targets[..2] } else { &targets };
        Victim::Pod(self.node(), self.choose(there), layer)
    }

    fn pull(&mut self, pull: Pull) -> Victim {
        Victim::ImagePull(self.node(), pull, self.up_to(PULL_MS))
    }

    fn one_after_the_other(&mut self, first: Role, second: Role) -> [Kind; 2] {
        let node = self.node();
        [first, second].map(|role| Kind::Kill(Victim::Part(node, role)))
    }

    fn stop_of_leader(&mut self, role: Role, longest: Duration) -> Kind {
        Kind::Stop(of_leader(role), self.time(longest))
    }

    fn up_to(&mut self, milliseconds: u64) -> Duration {
        Duration::from_millis(self.below(milliseconds))
    }

    /// At least two seconds.
    fn time(&mut self, longest: Duration) -> Duration {
        let most = u64::try_from(longest.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(2000 + self.below(most.saturating_sub(2000).max(1)))
    }
}

/// How long after the first fault of a round the second one comes.
pub fn distance(round: &[Fault]) -> Option<&'static str> {
    let [_, second] = round else { return None };
    Some(match second.delay.as_millis() {
        0 => "pairs at once",
        delay if delay < u128::from(LATE_MS) => "pairs within 2 s",
        _ => "pairs 8 s apart",
    })
}

#[test]
fn seed_determines_faults() {
    let longest = Duration::from_secs(30);
    let chosen = |seed| -> Vec<_> { rounds(seed, longest).take(300).collect() };
    let plan = chosen(7);
    assert_eq!(plan, chosen(7));
    assert_ne!(plan, chosen(8));
    let cuts = plan.iter().flatten();
    let cuts: Vec<_> = cuts
        .filter_map(|fault| match fault.kind {
            Kind::Cut(_, _, time) => Some(time),
            _ => None,
        })
        .collect();
    assert!(cuts.iter().any(|time| time.as_secs() >= 25), "{cuts:?}");
}

#[test]
fn every_kind_occurs_alone_and_in_pairs() {
    use std::collections::BTreeMap;

    for seed in 0..20 {
        let plan = rounds(seed, Duration::from_secs(30)).take(300);
        let plan: Vec<_> = plan.collect();
        let mut kinds: BTreeMap<String, u32> = BTreeMap::new();
        for fault in plan.iter().flatten() {
            *kinds.entry(fault.kind.name()).or_default() += 1;
        }
        assert!(kinds.len() >= 50, "{kinds:?}");
        assert!(kinds.values().all(|count| *count >= 3), "{kinds:?}");
        let count = |wanted: &str| {
            let pairs = plan.iter().filter_map(|round| distance(round));
            pairs.filter(|found| *found == wanted).count()
        };
        for distance in ["pairs at once", "pairs within 2 s", "pairs 8 s apart"] {
            assert!(count(distance) >= 15, "{distance}: {}", count(distance));
        }
        let guard_then_worker = |round: &&Vec<Fault>| {
            let hit = |fault: &Fault, wanted: Role| matches!(fault.kind, Kind::Kill(Victim::Part(_, role)) if role == wanted);
            let [first, second] = &round[..] else {
                return false;
            };
            hit(first, Role::HubGuard)
                && hit(second, Role::Hub)
                && first.kind.node() == second.kind.node()
                && second.delay.as_millis() == u128::from(LATE_MS)
        };
        assert!(plan.iter().filter(guard_then_worker).count() >= 3);
        for fault in plan.iter().flatten().filter(|fault| !fault.delay.is_zero()) {
            assert!(
                !matches!(
                    fault.kind,
                    Kind::KillAtEnd(..) | Kind::Kill(Victim::ImagePull(..))
                ),
                "{fault}"
            );
        }
    }
}
