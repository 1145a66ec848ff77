//! Statistics of the node: only of its own processes ([`NodeProcesses`](crate::NodeProcesses)), not of the whole machine.
//!
//! If a control group contains exactly these processes, the kernel's numbers are used. Otherwise the usage of processes is
//! added up: those with the configured environment variable, and their descendants. Pods are measured by their sandboxes,
//! because with `hidepid` the agent cannot see their processes.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{
    ContainerStats, FsStats, InterfaceStats, IoStats, MemoryStats, NetworkStats, NodeStats,
    PodStats, RlimitStats, RuntimeStats,
};
use linux::cgroup::Cgroup;
use linux::monotonic::MonotonicSum;
use linux::usage::{ProcessMemory, ProcessSample, ProcessTable};
use pod_protocol::usage::MemoryUsage;

use super::cpu_rates::RatesRound;
use super::pod::{memory_stats, usage_stats};
use crate::NodeConfig;

pub(super) struct NodeStatsCollector {
    started: Timestamp,
    /// CPU time in nanoseconds that was used before `started`: by earlier agents, or before the cluster started.
    cpu_before: u64,
    /// The environment variable of the node's processes.
    environment: Option<String>,
    /// The control group of the node's processes, if it exists.
    group: Option<Cgroup>,
    /// The sum of CPU time of all processes outside of pods that were ever seen.
    cpu: Mutex<MonotonicSum>,
    pods: Mutex<PodCpuTime>,
}

/// CPU time in nanoseconds that pods have used since this agent started.
struct PodCpuTime {
    used: u64,
    /// The total of each pod at the last measurement, by its uid …
    last: HashMap<String, u64>,
    /// … and the time of that.
    measured: Timestamp,
}

impl PodCpuTime {
    fn since(started: Timestamp) -> Self {
        Self {
            used: 0,
            last: HashMap::new(),
            measured: started,
        }
    }

    /// Adds a measurement, and returns the sum.
    fn note(&mut self, pods: &[PodStats], now: Timestamp) -> u64 {
        let mut last = HashMap::new();
        for pod in pods {
            let used = pod.usage.cpu.as_ref();
            let used = used.map_or(0, |cpu| cpu.usage_core_nano_seconds);
            let uid = &pod.pod_ref.uid;
            let before = match self.last.get(uid) {
                Some(before) if *before <= used => *before,
                // A new sandbox counts from 0.
                Some(_) => 0,
                // The pod is older than this agent, or its sandbox did not answer the last time.
                None if pod.usage.start_time.as_second() < self.measured.as_second() => used,
                None => 0,
            };
            self.used += used - before;
            last.insert(uid.clone(), used);
        }
        self.last = last;
        self.measured = now;
        self.used
    }
}

impl NodeStatsCollector {
    pub(super) fn new(config: &NodeConfig) -> Self {
        let processes = config.processes.as_ref();
        let started = Timestamp::now();
        let mut collector = Self {
            started,
            cpu_before: 0,
            environment: processes.map(|processes| processes.environment.clone()),
            group: processes.and_then(|processes| enclosing_group(&processes.cgroup)),
            cpu: Mutex::default(),
            pods: Mutex::new(PodCpuTime::since(started)),
        };
        let counted = collector
            .group
            .as_ref()
            .and_then(|group| group.usage().ok());
        collector.cpu_before = match counted {
            Some(usage) => usage.cpu_ns,
            None => collector.processes().0,
        };
        collector
    }

    pub(super) fn measure(
        &self,
        config: &NodeConfig,
        pods: &[PodStats],
        now: Timestamp,
        rates: &mut RatesRound<'_>,
    ) -> NodeStats {
        let counted = self.group.as_ref().and_then(|group| group.usage().ok());
        let pods_sum = sum_of_pods(pods, now, rates);
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
                add(&mut memory, pods_sum.usage.memory.as_ref());
                let cpu = cpu + self.pods.lock().unwrap().note(pods, now);
                (other.map_or(cpu, |usage| usage.cpu_ns), memory)
            }
        };
        // Without a scratch directory, pods run on other machines.
        let scratch = config.scratch_dir();
        let fs = scratch.and_then(|scratch| file_system(scratch, now));
        NodeStats {
            node_name: config.name.clone(),
            system_containers: [kubelet(now, rates), Some(pods_sum)]
                .into_iter()
                .flatten()
                .collect(),
            usage: usage_stats(
                "node",
                used.saturating_sub(self.cpu_before),
                memory_stats(&memory, Some(config.capacity.memory_bytes), now),
                self.started,
                rates,
            ),
            network: scratch.and_then(|_| network(now)),
            fs,
            runtime: fs.map(|fs| RuntimeStats {
                image_fs: fs,
                container_fs: fs,
            }),
            rlimit: scratch.and_then(|_| rlimit(now)),
        }
    }

    /// CPU time and memory of the node's processes outside of pods: sandboxes measure pods more precisely.
    fn processes(&self) -> (u64, MemoryUsage) {
        let table = ProcessTable::read().unwrap_or_default();
        let agent = agent_processes();
        let processes = table.subtree(self.roots(&table, &agent));
        let sandboxes = processes.iter().copied().filter(|pid| is_sandbox(*pid));
        let sandboxes: HashSet<i32> = sandboxes.collect();
        let below_sandbox = |pid: &i32| {
            let sample = table.get(*pid);
            sample.is_some_and(|sample| sandboxes.contains(&sample.parent))
        };
        let pod_processes = table.subtree(processes.iter().copied().filter(below_sandbox));
        let mut cpu = Duration::ZERO;
        let mut memory = MemoryUsage::default();
        for pid in processes.difference(&pod_processes) {
            if let Some(sample) = table.get(*pid) {
                // Exclude the CPU time of exited children, which belonged to pods.
                let alone = agent.contains(pid) || sandboxes.contains(pid);
                cpu += if alone { sample.own_cpu } else { sample.cpu };
                let own = ProcessMemory::of(*pid, sample);
                memory.usage += own.all;
                memory.working_set += own.all;
                memory.rss += own.anonymous;
                memory.page_faults += sample.page_faults.0;
                memory.major_page_faults += sample.page_faults.1;
            }
        }
        let used = u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
        (self.cpu.lock().unwrap().record(used), memory)
    }

    /// The processes with the configured environment variable, and those of the agent.
    fn roots(&self, table: &ProcessTable, agent: &[i32]) -> Vec<i32> {
        let mut roots = agent.to_vec();
        if let Some(variable) = &self.environment {
            let is_selected = |pid: &i32| linux::process::has_mark(*pid, variable);
            roots.extend(table.pids().filter(is_selected));
        }
        roots
    }
}

/// The agent and its guard.
fn agent_processes() -> Vec<i32> {
    let guard = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    let own = i32::try_from(std::process::id()).ok();
    guard
        .filter(|pid| *pid > 1)
        .into_iter()
        .chain(own)
        .collect()
}

/// Whether a process is a sandbox, or the inner process that is forked from it.
fn is_sandbox(pid: i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut arguments = line.split(|byte| *byte == 0).skip(1);
    arguments.next() == Some(b"internal") && arguments.next() == Some(b"sandbox")
}

/// The control group of this name that contains this process.
fn enclosing_group(name: &str) -> Option<Cgroup> {
    let own = Cgroup::own()?;
    let mut ancestors = own.path().ancestors();
    ancestors
        .find(|path| path.file_name().is_some_and(|found| found == name))
        .map(Cgroup::at)
}

/// The sum of all pods, as the system container `pods`.
fn sum_of_pods(pods: &[PodStats], now: Timestamp, rates: &mut RatesRound<'_>) -> ContainerStats {
    // Pods may be older than this agent.
    let started = pods.iter().map(|pod| pod.usage.start_time).min();
    let cpu = pods.iter().filter_map(|pod| pod.usage.cpu.as_ref());
    let used = cpu.map(|cpu| cpu.usage_core_nano_seconds).sum();
    let mut memory = MemoryUsage::default();
    for pod in pods {
        add(&mut memory, pod.usage.memory.as_ref());
    }
    ContainerStats {
        name: "pods".to_owned(),
        usage: usage_stats(
            "pods",
            used,
            memory_stats(&memory, None, now),
            started.unwrap_or(now),
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
fn kubelet(now: Timestamp, rates: &mut RatesRound<'_>) -> Option<ContainerStats> {
    let pid = i32::try_from(std::process::id()).ok()?;
    let sample = ProcessSample::of(pid)?;
    let memory = ProcessMemory::of(pid, &sample);
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
        usage: usage_stats(
            "kubelet",
            used,
            memory_stats(&memory, None, now),
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

/// The host's interfaces. The default interface is that of the default route.
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
    let name = default_interface(&routes);
    let found = name.and_then(|name| all.iter().find(|interface| interface.name == name));
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
    let pid_max = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok()?;
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    // `0.10 0.20 0.30 2/345 6789`
    let (_, tasks) = load.split_whitespace().nth(3)?.split_once('/')?;
    Some(RlimitStats {
        time: now,
        maxpid: pid_max.trim().parse().ok()?,
        curproc: tasks.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_measured() {
        let config = crate::node::tests::config();
        let mut collector = NodeStatsCollector::new(&config);
        collector.cpu_before = 0;
        let rates = super::super::cpu_rates::CpuRates::default();
        let node = collector.measure(&config, &[], Timestamp::now(), &mut rates.begin_round());
        assert!(node.usage.cpu.unwrap().usage_core_nano_seconds > 0);
        let memory = node.usage.memory.unwrap();
        assert!(memory.working_set_bytes > 0 && memory.available_bytes.unwrap() > 0);
        assert!(node.fs.unwrap().capacity_bytes > 0);
        assert!(node.rlimit.unwrap().curproc > 0);
        let names: Vec<_> = node.system_containers.iter().map(|c| &c.name[..]).collect();
        assert_eq!(names, ["kubelet", "pods"]);
    }

    #[test]
    fn earlier_cpu_time_is_not_counted() {
        let config = crate::node::tests::config();
        let mut collector = NodeStatsCollector::new(&config);
        // Earlier processes have used a day of CPU time.
        const DAY: u64 = 86_400_000_000_000;
        let counter = collector.cpu.get_mut().unwrap();
        counter.record(DAY);
        counter.record(0);
        collector.cpu_before += DAY;
        let rates = super::super::cpu_rates::CpuRates::default();
        let node = collector.measure(&config, &[], Timestamp::now(), &mut rates.begin_round());
        let used = node.usage.cpu.unwrap().usage_core_nano_seconds;
        assert!(used < 3_600_000_000_000, "{used}");
    }

    #[test]
    fn pod_cpu_time_counts_from_agent_start() {
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
        let mut time = PodCpuTime::since(at(10));
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
    fn default_interface_is_that_of_default_route() {
        let routes = "Iface\tDestination\tGateway\neth1\t0000A8C0\t0\neth0\t00000000\t0101A8C0\n";
        assert_eq!(default_interface(routes), Some("eth0"));
        assert_eq!(default_interface(""), None);
    }
}
