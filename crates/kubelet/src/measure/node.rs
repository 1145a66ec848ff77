//! What the node uses: what belongs to it ([`Members`]), and nothing else of the machine.
//!
//! Often there is a control group for just that, and the kernel counts in it. Where there is none, processes are added up: those that
//! carry the mark in their environment, and all that they have started. What pods use their sandboxes tell: `/proc` may not show which
//! processes are theirs (`hidepid`).

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{
    ContainerStats, FsStats, InterfaceStats, IoStats, MemoryStats, NetworkStats, NodeStats,
    PodStats, RlimitStats, RuntimeStats,
};
use linux::cgroup::Group;
use linux::usage::{Memory, Sample, Table};
use sandbox::usage::{Counter, MemoryUsage};

use super::convert;
use super::rates::Round;
use crate::NodeConfig;

/// Measures the node.
pub(super) struct NodeMeter {
    began: Timestamp,
    /// Nanoseconds of processors that were used before that: by agents before this one, or before there was a cluster.
    before: u64,
    /// What the node's processes carry in their environment.
    mark: Option<String>,
    /// Their control group, if there is one.
    group: Option<Group>,
    /// Nanoseconds of processors, of what is no pod's.
    cpu: Mutex<Counter>,
    pods: Mutex<PodTime>,
}

/// Nanoseconds of processors that pods have used since this agent began.
struct PodTime {
    used: u64,
    /// What each pod had used in all when it was last looked at, by its uid …
    last: HashMap<String, u64>,
    /// … and when that was.
    looked: Timestamp,
}

impl PodTime {
    fn since(began: Timestamp) -> Self {
        Self {
            used: 0,
            last: HashMap::new(),
            looked: began,
        }
    }

    /// Takes note of the newest figures; what was used until now.
    fn note(&mut self, pods: &[PodStats], now: Timestamp) -> u64 {
        let mut last = HashMap::new();
        for pod in pods {
            let used = pod.figures.cpu.as_ref();
            let used = used.map_or(0, |cpu| cpu.usage_core_nano_seconds);
            let uid = &pod.pod_ref.uid;
            let before = match self.last.get(uid) {
                Some(before) if *before <= used => *before,
                // A new sandbox counts from 0.
                Some(_) => 0,
                // It is older than this agent, or its sandbox did not answer the last time.
                None if pod.figures.start_time.as_second() < self.looked.as_second() => used,
                None => 0,
            };
            self.used += used - before;
            last.insert(uid.clone(), used);
        }
        self.last = last;
        self.looked = now;
        self.used
    }
}

impl NodeMeter {
    pub(super) fn new(config: &NodeConfig) -> Self {
        let members = config.members.as_ref();
        let began = Timestamp::now();
        let mut meter = Self {
            began,
            before: 0,
            mark: members.map(|members| members.variable.clone()),
            group: members.and_then(|members| above_us(&members.group)),
            cpu: Mutex::default(),
            pods: Mutex::new(PodTime::since(began)),
        };
        let counted = meter.group.as_ref().and_then(|group| group.usage().ok());
        meter.before = match counted {
            Some(usage) => usage.cpu_ns,
            None => meter.processes().0,
        };
        meter
    }

    pub(super) fn measure(
        &self,
        config: &NodeConfig,
        pods: &[PodStats],
        now: Timestamp,
        rates: &mut Round<'_>,
    ) -> NodeStats {
        let counted = self.group.as_ref().and_then(|group| group.usage().ok());
        let of_pods = sum_of_pods(pods, now, rates);
        let (used, memory) = match counted {
            Some(usage) if usage.memory > 0 => {
                let memory = MemoryUsage {
                    usage: usage.memory,
                    working_set: usage.working_set,
                    rss: usage.rss,
                    page_faults: usage.page_faults.0,
                    major_page_faults: usage.page_faults.1,
                    swap: usage.swap,
                };
                (usage.cpu_ns, memory)
            }
            other => {
                let (cpu, mut memory) = self.processes();
                add(&mut memory, of_pods.figures.memory.as_ref());
                let mut time = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
                let cpu = cpu + time.note(pods, now);
                (other.map_or(cpu, |usage| usage.cpu_ns), memory)
            }
        };
        NodeStats {
            node_name: config.name.clone(),
            system_containers: [kubelet(now, rates), Some(of_pods)]
                .into_iter()
                .flatten()
                .collect(),
            figures: convert::figures(
                "node",
                used.saturating_sub(self.before),
                convert::memory(&memory, Some(config.capacity.memory_bytes), now),
                self.began,
                rates,
            ),
            network: network(now),
            fs: file_system(&config.scratch_dir, now),
            runtime: file_system(&config.node_dir, now).map(|fs| RuntimeStats {
                image_fs: fs,
                container_fs: fs,
            }),
            rlimit: rlimit(now),
        }
    }

    /// Nanoseconds of processors and memory of all processes of the node that are no pod's: sandboxes know more of theirs.
    fn processes(&self) -> (u64, MemoryUsage) {
        let table = Table::read().unwrap_or_default();
        let agent = agent();
        let members = table.tree(self.roots(&table, &agent));
        let sandboxes = members.iter().copied().filter(|pid| is_sandbox(*pid));
        let sandboxes: HashSet<i32> = sandboxes.collect();
        let below_sandbox = |pid: &i32| {
            let sample = table.get(*pid);
            sample.is_some_and(|sample| sandboxes.contains(&sample.parent))
        };
        let of_pods = table.tree(members.iter().copied().filter(below_sandbox));
        let mut cpu = Duration::ZERO;
        let mut memory = MemoryUsage::default();
        for pid in members.difference(&of_pods) {
            if let Some(sample) = table.get(*pid) {
                // Those that these have waited for were pods.
                let alone = agent.contains(pid) || sandboxes.contains(pid);
                cpu += if alone { sample.own_cpu } else { sample.cpu };
                let own = Memory::of(*pid, sample);
                memory.usage += own.all;
                memory.working_set += own.all;
                memory.rss += own.anonymous;
                memory.page_faults += sample.page_faults.0;
                memory.major_page_faults += sample.page_faults.1;
            }
        }
        let used = u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
        let mut counter = self.cpu.lock().unwrap_or_else(PoisonError::into_inner);
        (counter.note(used), memory)
    }

    /// The processes that carry the mark, and the agent's.
    fn roots(&self, table: &Table, agent: &[i32]) -> Vec<i32> {
        let mut roots = agent.to_vec();
        if let Some(mark) = &self.mark {
            let carries = |pid: &i32| linux::process::carries(*pid, mark);
            roots.extend(table.pids().filter(carries));
        }
        roots
    }
}

/// This process and its guard.
fn agent() -> Vec<i32> {
    let guard = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    let ours = i32::try_from(std::process::id()).ok();
    guard
        .filter(|pid| *pid > 1)
        .into_iter()
        .chain(ours)
        .collect()
}

/// A sandbox, or the inner process that is forked from it.
fn is_sandbox(pid: i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).skip(1);
    words.next() == Some(b"internal") && words.next() == Some(b"sandbox")
}

/// The group of this name that we are in, or below.
fn above_us(name: &str) -> Option<Group> {
    let own = Group::own()?;
    let mut above = own.path().ancestors();
    above
        .find(|path| path.file_name().is_some_and(|found| found == name))
        .map(Group::at)
}

/// All pods together, as the system container `pods`.
fn sum_of_pods(pods: &[PodStats], now: Timestamp, rates: &mut Round<'_>) -> ContainerStats {
    // Pods are older than an agent that replaces another.
    let began = pods.iter().map(|pod| pod.figures.start_time).min();
    let cpu = pods.iter().filter_map(|pod| pod.figures.cpu.as_ref());
    let used = cpu.map(|cpu| cpu.usage_core_nano_seconds).sum();
    let mut memory = MemoryUsage::default();
    for pod in pods {
        add(&mut memory, pod.figures.memory.as_ref());
    }
    ContainerStats {
        name: "pods".to_owned(),
        figures: convert::figures(
            "pods",
            used,
            convert::memory(&memory, None, now),
            began.unwrap_or(now),
            rates,
        ),
        rootfs: None,
        logs: None,
        processes: 0,
        throttling: None,
        io: IoStats::default(),
    }
}

fn add(sum: &mut MemoryUsage, more: Option<&MemoryStats>) {
    if let Some(more) = more {
        sum.usage += more.usage_bytes;
        sum.working_set += more.working_set_bytes;
        sum.rss += more.rss_bytes;
        sum.page_faults += more.page_faults;
        sum.major_page_faults += more.major_page_faults;
    }
}

/// This process, as the system container `kubelet`.
fn kubelet(now: Timestamp, rates: &mut Round<'_>) -> Option<ContainerStats> {
    let pid = i32::try_from(std::process::id()).ok()?;
    let sample = Sample::of(pid)?;
    let memory = Memory::of(pid, &sample);
    let memory = MemoryUsage {
        usage: memory.all,
        working_set: memory.all,
        rss: memory.anonymous,
        page_faults: sample.page_faults.0,
        major_page_faults: sample.page_faults.1,
        swap: memory.swap,
    };
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let started = linux::usage::boot_time()? + sample.started / ticks;
    let started = Timestamp::from_second(i64::try_from(started).ok()?).ok()?;
    let used = u64::try_from(sample.cpu.as_nanos()).unwrap_or(u64::MAX);
    Some(ContainerStats {
        name: "kubelet".to_owned(),
        figures: convert::figures(
            "kubelet",
            used,
            convert::memory(&memory, None, now),
            started,
            rates,
        ),
        rootfs: None,
        logs: None,
        processes: 1,
        throttling: None,
        io: IoStats::default(),
    })
}

/// The host's interfaces; the default one is that of the default route.
fn network(now: Timestamp) -> Option<NetworkStats> {
    let pid = i32::try_from(std::process::id()).ok()?;
    let all: Vec<InterfaceStats> = linux::usage::interfaces(pid)
        .into_iter()
        .filter(|interface| interface.name != "lo" && !interface.name.starts_with("veth"))
        .map(|interface| InterfaceStats {
            name: interface.name,
            rx_bytes: interface.received.bytes,
            rx_errors: interface.received.errors,
            tx_bytes: interface.sent.bytes,
            tx_errors: interface.sent.errors,
            rx_packets: (interface.received.packets, interface.received.dropped),
            tx_packets: (interface.sent.packets, interface.sent.dropped),
        })
        .collect();
    let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    let usual = default_interface(&routes);
    let found = usual.and_then(|name| all.iter().find(|interface| interface.name == name));
    let default = found.or(all.first())?.clone();
    Some(NetworkStats {
        time: now,
        default,
        interfaces: all,
    })
}

fn default_interface(routes: &str) -> Option<&str> {
    routes.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let name = fields.next()?;
        (fields.next()? == "00000000").then_some(name)
    })
}

fn file_system(path: &Path, now: Timestamp) -> Option<FsStats> {
    let status = rustix::fs::statvfs(path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(status.f_frsize);
    Some(FsStats {
        time: now,
        available_bytes: bytes(status.f_bavail),
        capacity_bytes: bytes(status.f_blocks),
        used_bytes: bytes(status.f_blocks.saturating_sub(status.f_bfree)),
        inodes_free: status.f_ffree,
        inodes: status.f_files,
        inodes_used: status.f_files.saturating_sub(status.f_ffree),
    })
}

fn rlimit(now: Timestamp) -> Option<RlimitStats> {
    let most = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok()?;
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    // `0.10 0.20 0.30 2/345 6789`
    let (_, all) = load.split_whitespace().nth(3)?.split_once('/')?;
    Some(RlimitStats {
        time: now,
        maxpid: most.trim().parse().ok()?,
        curproc: all.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_measured() {
        let config = crate::node::tests::config();
        let mut meter = NodeMeter::new(&config);
        meter.before = 0;
        let rates = super::super::rates::Rates::default();
        let node = meter.measure(&config, &[], Timestamp::now(), &mut rates.begin());
        assert!(node.figures.cpu.unwrap().usage_core_nano_seconds > 0);
        let memory = node.figures.memory.unwrap();
        assert!(memory.working_set_bytes > 0 && memory.available_bytes.unwrap() > 0);
        assert!(node.fs.unwrap().capacity_bytes > 0);
        assert!(node.rlimit.unwrap().curproc > 0);
        let names: Vec<_> = node.system_containers.iter().map(|c| &c.name[..]).collect();
        assert_eq!(names, ["kubelet", "pods"]);
    }

    #[test]
    fn what_was_used_before_is_not_counted() {
        let config = crate::node::tests::config();
        let mut meter = NodeMeter::new(&config);
        // As if others had worked for a day.
        const DAY: u64 = 86_400_000_000_000;
        let counter = meter.cpu.get_mut().unwrap();
        counter.note(DAY);
        counter.note(0);
        meter.before += DAY;
        let rates = super::super::rates::Rates::default();
        let node = meter.measure(&config, &[], Timestamp::now(), &mut rates.begin());
        let used = node.figures.cpu.unwrap().usage_core_nano_seconds;
        assert!(used < 3_600_000_000_000, "{used}");
    }

    #[test]
    fn time_of_pods_is_counted_from_when_the_agent_began() {
        let at = |second: i64| Timestamp::from_second(1_000_000 + second).unwrap();
        let pod = |uid: &str, started: i64, used: u64| -> PodStats {
            let stats = serde_json::json!({
                "podRef": {"name": uid, "namespace": "default", "uid": uid},
                "startTime": at(started),
                "cpu": {"time": at(started), "usageCoreNanoSeconds": used},
                "containers": [],
            });
            serde_json::from_value(stats).unwrap()
        };
        let mut time = PodTime::since(at(10));
        // One was there before the agent.
        assert_eq!(
            time.note(&[pod("old", 0, 100), pod("new", 11, 5)], at(20)),
            5
        );
        assert_eq!(
            time.note(&[pod("old", 0, 107), pod("new", 11, 6)], at(30)),
            13
        );
        // It does not answer, and does again.
        assert_eq!(time.note(&[pod("new", 11, 6)], at(40)), 13);
        assert_eq!(
            time.note(&[pod("old", 0, 150), pod("new", 11, 6)], at(50)),
            13
        );
        // A sandbox was killed.
        assert_eq!(
            time.note(&[pod("old", 0, 4), pod("new", 11, 6)], at(60)),
            17
        );
        // Pods that have ended have used what they have used.
        assert_eq!(time.note(&[pod("later", 61, 3)], at(70)), 20);
    }

    #[test]
    fn the_default_interface_is_that_of_the_default_route() {
        let routes = "Iface\tDestination\tGateway\neth1\t0000A8C0\t0\neth0\t00000000\t0101A8C0\n";
        assert_eq!(default_interface(routes), Some("eth0"));
        assert_eq!(default_interface(""), None);
    }
}
