//! What the node uses: the job that it belongs to, and nothing else of the machine.
//!
//! Slurm often keeps a control group for the job on each node, and the kernel counts in it. Where it doesn't, the job's processes are
//! added up: those that carry its number in their environment, and all that they have started.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

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
    /// The job's number, if there is a job.
    job: Option<String>,
    /// The job's control group on this node, if there is one.
    group: Option<Group>,
    cpu: Mutex<Counter>,
}

impl NodeMeter {
    pub(super) fn new() -> Self {
        let job = std::env::var("SLURM_JOB_ID").ok();
        let group = job.as_deref().and_then(group_of_job);
        Self {
            began: Timestamp::now(),
            job,
            group,
            cpu: Mutex::default(),
        }
    }

    pub(super) fn measure(
        &self,
        config: &NodeConfig,
        pods: &[PodStats],
        now: Timestamp,
        rates: &mut Round<'_>,
    ) -> NodeStats {
        let counted = self.group.as_ref().and_then(|group| group.usage().ok());
        let of_pods = sum_of_pods(pods, now, self.began, rates);
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
                used,
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

    /// Processors of all processes of the job, and memory of those that are no pod's: sandboxes know more of theirs.
    fn processes(&self) -> (u64, MemoryUsage) {
        let table = Table::read().unwrap_or_default();
        let members = table.tree(self.roots(&table));
        let sandboxes = members.iter().copied().filter(|pid| is_sandbox(*pid));
        let sandboxes: HashSet<i32> = sandboxes.collect();
        let below_sandbox = |pid: &i32| {
            let sample = table.get(*pid);
            sample.is_some_and(|sample| sandboxes.contains(&sample.parent))
        };
        let of_pods = table.tree(members.iter().copied().filter(below_sandbox));
        let mut memory = MemoryUsage::default();
        for pid in members.difference(&of_pods) {
            if let Some(sample) = table.get(*pid) {
                let own = Memory::of(*pid, sample);
                memory.usage += own.all;
                memory.working_set += own.all;
                memory.rss += own.anonymous;
                memory.page_faults += sample.page_faults.0;
                memory.major_page_faults += sample.page_faults.1;
            }
        }
        let used = u64::try_from(table.cpu(&members).as_nanos()).unwrap_or(u64::MAX);
        let mut counter = self.cpu.lock().unwrap_or_else(PoisonError::into_inner);
        (counter.note(used), memory)
    }

    /// The processes that carry the job's number. Without a job, our own guard.
    fn roots(&self, table: &Table) -> Vec<i32> {
        let guard = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        let ours = i32::try_from(std::process::id()).ok();
        let mut roots: Vec<i32> = guard
            .filter(|pid| *pid > 1)
            .into_iter()
            .chain(ours)
            .collect();
        if let Some(job) = &self.job {
            let mark = format!("SLURM_JOB_ID={job}");
            let user = rustix::process::getuid().as_raw();
            roots.extend(table.pids().filter(|pid| carries(*pid, user, &mark)));
        }
        roots
    }
}

/// Whether a process of this user has such a variable.
fn carries(pid: i32, user: u32, variable: &str) -> bool {
    let is_theirs = std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|meta| meta.uid() == user);
    is_theirs
        && std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| {
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|found| found == variable.as_bytes())
        })
}

/// A sandbox, or the inner process that is forked from it.
fn is_sandbox(pid: i32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).skip(1);
    words.next() == Some(b"internal") && words.next() == Some(b"sandbox")
}

/// `…/job_12` above the group that we are in, as Slurm names it.
fn group_of_job(job: &str) -> Option<Group> {
    let own = Group::own()?;
    let name = format!("job_{job}");
    let mut above = own.path().ancestors();
    above
        .find(|path| path.file_name().is_some_and(|found| found == name.as_str()))
        .map(Group::at)
}

/// All pods together, as the system container `pods`.
fn sum_of_pods(
    pods: &[PodStats],
    now: Timestamp,
    began: Timestamp,
    rates: &mut Round<'_>,
) -> ContainerStats {
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
            began,
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
        let meter = NodeMeter::new();
        let rates = super::super::rates::Rates::default();
        let config = crate::node::tests::config();
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
    fn the_default_interface_is_that_of_the_default_route() {
        let routes = "Iface\tDestination\tGateway\neth1\t0000A8C0\t0\neth0\t00000000\t0101A8C0\n";
        assert_eq!(default_interface(routes), Some("eth0"));
        assert_eq!(default_interface(""), None);
    }
}
