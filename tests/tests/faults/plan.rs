//! Chooses the faults of a run: a pure function of its seed.

use std::time::Duration;

use e2e::Role;

use crate::fault::{
    Direction, Fault, FaultKind, NODES, PodProcess, PullKind, Target, Termination, Victim,
};

/// The maximum delay between two faults that are meant to overlap.
const MAX_DELAY_MS: u64 = 2000;
/// The delay of a second fault that hits a cluster which has already recovered from the first.
const LATE_MS: u64 = 8000;

/// The rounds of a run: an infinite iterator. Each has one fault or two.
pub struct Rounds {
    random: Random,
    /// The templates that were not used yet, in random order.
    templates: Vec<Template>,
    longest: Duration,
}

/// The rounds for a seed. No fault lasts longer than `longest`.
pub fn rounds(seed: u64, longest: Duration) -> Rounds {
    Rounds {
        random: Random {
            state: seed,
            fixed_node: None,
            late: false,
        },
        templates: Vec::new(),
        longest,
    }
}

impl Iterator for Rounds {
    type Item = Vec<Fault>;

    fn next(&mut self) -> Option<Vec<Fault>> {
        let template = self.take_template(|_| true);
        let (random, longest) = (&mut self.random, self.longest);
        let now = |kind| Fault {
            delay: Duration::ZERO,
            kind,
        };
        let first = match template {
            Template::Any(generate) | Template::First(generate) => now(generate(random, longest)),
            Template::LatePair(generate) => {
                let [first, second] = generate(random, longest);
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
        self.random.fixed_node = (self.random.below(2) == 0).then(|| first.kind.node());
        let delay = match self.random.below(3) {
            0 => 0,
            1 => self.random.below(MAX_DELAY_MS),
            _ => LATE_MS,
        };
        self.random.late = delay == LATE_MS;
        let second = match self.take_template(|template| matches!(template, Template::Any(_))) {
            Template::Any(generate) | Template::First(generate) => {
                generate(&mut self.random, self.longest)
            }
            Template::LatePair(_) => unreachable!("not a second fault"),
        };
        self.random.fixed_node = None;
        self.random.late = false;
        let second = Fault {
            delay: Duration::from_millis(delay),
            kind: second,
        };
        Some(vec![first, second])
    }
}

impl Rounds {
    /// Takes the last template that is `usable`. Every template is used once before any is repeated.
    fn take_template(&mut self, usable: fn(&Template) -> bool) -> Template {
        loop {
            if let Some(index) = self.templates.iter().rposition(usable) {
                return self.templates.remove(index);
            }
            let mut shuffled = templates();
            self.random.shuffle(&mut shuffled);
            shuffled.append(&mut self.templates);
            self.templates = shuffled;
        }
    }
}

/// A kind of fault. The function chooses the remaining parameters at random.
enum Template {
    /// Alone, or in a pair with any other.
    Any(Generate<FaultKind>),
    /// Never the second of a pair, because it needs pods that the first fault may have prevented from running or terminating.
    First(Generate<FaultKind>),
    /// A pair of which the second fault comes after the cluster has recovered from the first.
    LatePair(Generate<[FaultKind; 2]>),
}

type Generate<T> = fn(&mut Random, Duration) -> T;

fn templates() -> Vec<Template> {
    use FaultKind::{FullDisk, Kill, KillAtTermination, KillRepeatedly, Partition, Stop};
    use Template::{Any, First, LatePair};
    vec![
        Any(|random, _| Kill(random.process(Role::Agent))),
        Any(|random, _| Kill(random.process(Role::AgentGuard))),
        Any(|random, _| Kill(random.process(Role::Hub))),
        Any(|random, _| Kill(random.process(Role::HubInside))),
        Any(|random, _| Kill(random.process(Role::Janitor))),
        Any(|random, _| KillRepeatedly(random.process(Role::Agent), REPETITIONS)),
        Any(|random, _| KillRepeatedly(random.process(Role::Hub), REPETITIONS)),
        Any(|_, _| Kill(on_leader(Role::Component("etcd")))),
        Any(|_, _| Kill(on_leader(Role::Component("kube-apiserver")))),
        Any(|_, _| Kill(on_leader(Role::Component("kube-scheduler")))),
        Any(|_, _| Kill(on_leader(Role::Component("kube-controller-manager")))),
        First(|random, _| Kill(random.pull(PullKind::Unpack))),
        First(|random, _| Kill(random.pull(PullKind::Download))),
        Any(|random, _| Kill(random.pod(PodProcess::Sandbox))),
        Any(|random, _| Kill(random.pod(PodProcess::ForkServer))),
        Any(|random, _| Kill(random.pod(PodProcess::Inner))),
        Any(|random, _| Kill(random.pod(PodProcess::Container))),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Ends, PodProcess::Sandbox);
            KillAtTermination(victim, Termination::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Ends, PodProcess::Inner);
            KillAtTermination(victim, Termination::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let agent = random.process(Role::Agent);
            KillAtTermination(agent, Termination::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let guard = random.process(Role::AgentGuard);
            KillAtTermination(guard, Termination::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let server = on_leader(Role::Component("kube-apiserver"));
            KillAtTermination(server, Termination::Exit, random.up_to(EXIT_MS))
        }),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Deleted, PodProcess::Sandbox);
            KillAtTermination(victim, Termination::Deletion, random.up_to(DELETION_MS))
        }),
        First(|random, _| {
            let victim = Victim::Pod(random.node(), Target::Deleted, PodProcess::Inner);
            KillAtTermination(victim, Termination::Deletion, random.up_to(DELETION_MS))
        }),
        First(|random, _| {
            let agent = random.process(Role::Agent);
            KillAtTermination(agent, Termination::Deletion, random.up_to(DELETION_MS))
        }),
        First(|random, _| {
            let guard = random.process(Role::AgentGuard);
            KillAtTermination(guard, Termination::Deletion, random.up_to(DELETION_MS))
        }),
        LatePair(|random, _| random.kill_in_turn(Role::HubInside, Role::Hub)),
        LatePair(|random, _| random.kill_in_turn(Role::Hub, Role::HubInside)),
        LatePair(|random, _| random.kill_in_turn(Role::AgentGuard, Role::Agent)),
        LatePair(|random, _| random.kill_in_turn(Role::Agent, Role::AgentGuard)),
        // After the first kill, the leader starts a new agent by srun. The agent must not depend on that srun.
        LatePair(|random, _| {
            let guard = random.process(Role::AgentGuard);
            [Kill(guard), Kill(on_leader(Role::AgentSrun))]
        }),
        LatePair(|random, longest| {
            let guard = random.process(Role::AgentGuard);
            let srun = on_leader(Role::AgentSrun);
            [Kill(guard), Stop(srun, random.time(longest))]
        }),
        Any(|random, longest| Stop(random.process(Role::Agent), random.time(longest))),
        Any(|random, longest| Stop(random.process(Role::AgentGuard), random.time(longest))),
        Any(|random, longest| Stop(random.process(Role::Hub), random.time(longest))),
        Any(|random, longest| Stop(random.process(Role::HubInside), random.time(longest))),
        Any(|random, longest| Stop(random.process(Role::Janitor), random.time(longest))),
        Any(|random, longest| random.stop_on_leader(Role::LeaderGuard, longest)),
        Any(|random, longest| random.stop_on_leader(Role::LeaderWorker, longest)),
        Any(|random, longest| random.stop_on_leader(Role::ControlPlaneOuter, longest)),
        Any(|random, longest| random.stop_on_leader(Role::ControlPlaneFirst, longest)),
        Any(|random, longest| random.stop_on_leader(Role::Component("etcd"), longest)),
        Any(|random, longest| random.stop_on_leader(Role::Component("kube-apiserver"), longest)),
        Any(|random, longest| random.stop_on_leader(Role::Component("kube-scheduler"), longest)),
        Any(|random, longest| {
            random.stop_on_leader(Role::Component("kube-controller-manager"), longest)
        }),
        First(|random, longest| Stop(random.pull(PullKind::Unpack), random.time(longest))),
        First(|random, longest| Stop(random.pull(PullKind::Download), random.time(longest))),
        Any(|random, longest| Stop(random.pod(PodProcess::Sandbox), random.time(longest))),
        Any(|random, longest| Stop(random.pod(PodProcess::ForkServer), random.time(longest))),
        Any(|random, longest| Stop(random.pod(PodProcess::Inner), random.time(longest))),
        Any(|random, longest| Stop(random.pod(PodProcess::Container), random.time(longest))),
        Any(|random, longest| {
            Partition(random.other_node(), Direction::Both, random.time(longest))
        }),
        Any(|random, longest| {
            let node = random.other_node();
            Partition(node, Direction::ToLeader, random.time(longest))
        }),
        Any(|random, longest| {
            let node = random.other_node();
            Partition(node, Direction::FromLeader, random.time(longest))
        }),
        Any(|random, longest| {
            let node = random.other_node();
            Partition(node, Direction::Unreachable, random.time(longest))
        }),
        Any(|random, longest| FullDisk(random.node(), random.time(longest.min(MAX_FULL_DISK)))),
    ]
}

/// More kills than after which a supervisor might assume a crash loop.
const REPETITIONS: usize = 6;
/// Less than the half minute after which the kubelet evicts pods from a full disk.
const MAX_FULL_DISK: Duration = Duration::from_secs(15);
/// Within this time, pods of [`Target::Ends`] have exited.
const EXIT_MS: u64 = 300;
/// Within this time, the pod of [`Target::Deleted`] has terminated. Agents may be hit later, too.
const DELETION_MS: u64 = 1000;
/// The minimum duration of a pull.
const PULL_MS: u64 = 100;

fn on_leader(role: Role) -> Victim {
    Victim::Process(NODES[0], role)
}

/// `SplitMix64`: small, and the same on every machine and in every release.
struct Random {
    state: u64,
    /// The node of the next fault, if it is already chosen.
    fixed_node: Option<&'static str>,
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
        self.fixed_node.unwrap_or(chosen)
    }

    /// Any node but the leader's.
    fn other_node(&mut self) -> &'static str {
        let chosen = self.choose(&NODES[1..]);
        self.fixed_node
            .filter(|node| *node != NODES[0])
            .unwrap_or(chosen)
    }

    fn process(&mut self, role: Role) -> Victim {
        Victim::Process(self.node(), role)
    }

    fn pod(&mut self, process: PodProcess) -> Victim {
        let targets = [Target::Steady, Target::Keeper, Target::Ends, Target::Work];
        let available = if self.late { &targets[..2] } else { &targets };
        Victim::Pod(self.node(), self.choose(available), process)
    }

    fn pull(&mut self, pull: PullKind) -> Victim {
        Victim::ImagePull(self.node(), pull, self.up_to(PULL_MS))
    }

    fn kill_in_turn(&mut self, first: Role, second: Role) -> [FaultKind; 2] {
        let node = self.node();
        [first, second].map(|role| FaultKind::Kill(Victim::Process(node, role)))
    }

    fn stop_on_leader(&mut self, role: Role, longest: Duration) -> FaultKind {
        FaultKind::Stop(on_leader(role), self.time(longest))
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

/// The delay between the two faults of a round, as a class.
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
    let partitions = plan.iter().flatten();
    let partitions: Vec<_> = partitions
        .filter_map(|fault| match fault.kind {
            FaultKind::Partition(_, _, time) => Some(time),
            _ => None,
        })
        .collect();
    assert!(
        partitions.iter().any(|time| time.as_secs() >= 25),
        "{partitions:?}"
    );
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
        let inside_then_hub = |round: &&Vec<Fault>| {
            let hit = |fault: &Fault, wanted: Role| matches!(fault.kind, FaultKind::Kill(Victim::Process(_, role)) if role == wanted);
            let [first, second] = &round[..] else {
                return false;
            };
            hit(first, Role::HubInside)
                && hit(second, Role::Hub)
                && first.kind.node() == second.kind.node()
                && second.delay.as_millis() == u128::from(LATE_MS)
        };
        assert!(plan.iter().filter(inside_then_hub).count() >= 3);
        for fault in plan.iter().flatten().filter(|fault| !fault.delay.is_zero()) {
            assert!(
                !matches!(
                    fault.kind,
                    FaultKind::KillAtTermination(..) | FaultKind::Kill(Victim::ImagePull(..))
                ),
                "{fault}"
            );
        }
    }
}
