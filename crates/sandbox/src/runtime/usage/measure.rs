//! Measures a pod.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use linux::cgroup::{Cgroup, CgroupUsage};
use linux::monotonic::MonotonicSum;
use pod_protocol::usage::{
    ContainerUsage, HostResources, InterfaceUsage, IoUsage, MemoryUsage, PodUsage, ProbeCount,
    ThrottlingUsage, TrafficUsage, VolumeUsage,
};

use super::disk::DiskUsageCache;
use super::processes::{PodProcesses, ProcessTotals};

/// A container to measure.
#[derive(Clone, Debug)]
pub struct MeasuredContainer {
    /// Its name.
    pub name: String,
    /// Its id.
    pub id: String,
    /// Pid of its first process, in this process's pid namespace.
    pub pid: i32,
    /// When it was started.
    pub started: Timestamp,
    /// The directory with its changes to the image.
    pub root: PathBuf,
    /// The directory with its logs.
    pub logs: PathBuf,
    /// Its cgroup, if it has one.
    pub cgroup: Option<Cgroup>,
}

/// A volume to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredVolume {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
    /// Report the usage of the whole file system.
    pub whole_file_system: bool,
}

/// Bounds reading `/proc`, which blocks on a process whose memory is mapped from an unresponsive file server.
const PROC_TIMEOUT: Duration = Duration::from_secs(5);

/// Measures one pod repeatedly.
#[derive(Default)]
pub struct UsageMeter {
    disk: DiskUsageCache,
    /// Held by the thread that reads `/proc`, even after a timeout, so that blocked threads do not accumulate.
    proc_lock: Arc<tokio::sync::Mutex<()>>,
    /// By container id; the pod's under the empty id.
    cpu: RefCell<HashMap<String, MonotonicSum>>,
    /// Bytes read and written, by container id.
    disk_bytes: RefCell<HashMap<String, (MonotonicSum, MonotonicSum)>>,
    /// Number of probes by container, kind and result.
    probes: RefCell<BTreeMap<(String, &'static str, &'static str), u64>>,
}

impl UsageMeter {
    /// Measures the pod of the inner process; `None` if `/proc` cannot be read in time. `cgroup` is the pod's; `etc` holds its files in
    /// /etc.
    pub async fn measure(
        &self,
        inner: i32,
        cgroup: Option<&Cgroup>,
        host_network: bool,
        containers: &[MeasuredContainer],
        volumes: &[MeasuredVolume],
        etc: &Path,
    ) -> Option<PodUsage> {
        let at = Timestamp::now();
        let pids = containers.iter().map(|container| container.pid).collect();
        let (pod_totals, container_totals) = self.process_totals(inner, pids).await?;
        let ids: HashSet<&str> = containers.iter().map(|c| c.id.as_str()).collect();
        self.cpu
            .borrow_mut()
            .retain(|id, _| id.is_empty() || ids.contains(id.as_str()));
        self.disk_bytes
            .borrow_mut()
            .retain(|id, _| ids.contains(id.as_str()));
        let mut measured = Vec::new();
        for (container, totals) in containers.iter().zip(container_totals) {
            let mut usage = self.container(container, &totals);
            usage.root = self.disk.directory(&container.root).await;
            usage.logs = self.disk.directory(&container.logs).await;
            measured.push(usage);
        }
        let mut volume_usages = Vec::new();
        for volume in volumes {
            let disk = if volume.whole_file_system {
                self.disk.file_system(&volume.path).await
            } else {
                self.disk.directory(&volume.path).await
            };
            let name = volume.name.clone();
            volume_usages.extend(disk.map(|disk| VolumeUsage { name, disk }));
        }
        let etc_usage = self.disk.directory(etc).await;
        let walked = containers
            .iter()
            .flat_map(|container| [container.root.clone(), container.logs.clone()])
            .chain(volumes.iter().map(|volume| volume.path.clone()))
            .chain([etc.to_owned()]);
        self.disk.retain(&walked.collect());

        let (cpu_ns, memory) = match cgroup.and_then(|cgroup| cgroup.usage().ok()) {
            Some(usage) => (usage.cpu_ns, memory(&usage, &pod_totals)),
            None => (self.cpu_ns("", &pod_totals), pod_totals.memory),
        };
        Some(PodUsage {
            at,
            containers: measured,
            cpu_ns,
            memory,
            processes: pod_totals.processes,
            interfaces: if host_network {
                Vec::new()
            } else {
                // The inner process is not dumpable, so `/proc` does not show it with `hidepid`.
                let shown = containers.iter().map(|container| container.pid);
                let mut found = std::iter::once(inner).chain(shown).map(interfaces);
                found.find(|found| !found.is_empty()).unwrap_or_default()
            },
            volumes: volume_usages,
            etc: etc_usage,
            probes: self.probe_counts(),
            host: self.host(etc).await,
        })
    }

    /// Measures this machine. `scratch` is any file or directory of the pod.
    async fn host(&self, scratch: &Path) -> HostResources {
        let disk = self.disk.file_system(scratch).await;
        HostResources {
            available_memory: linux::host_resources::available_memory(),
            scratch: disk.map(|disk| disk.file_system),
            tasks: linux::host_resources::tasks(),
        }
    }

    /// Returns the totals of the pod, and of the containers with these first processes.
    async fn process_totals(
        &self,
        inner: i32,
        pids: Vec<i32>,
    ) -> Option<(ProcessTotals, Vec<ProcessTotals>)> {
        let lock = Arc::clone(&self.proc_lock).lock_owned();
        let totals = async {
            let lock = lock.await;
            // Reading /proc blocks, and the sandbox has one thread.
            let read = move || {
                let _lock = lock;
                let processes = PodProcesses::read(inner);
                let containers = pids.into_iter().map(|pid| processes.container_totals(pid));
                (processes.pod_totals(), containers.collect())
            };
            tokio::task::spawn_blocking(read).await.ok()
        };
        tokio::time::timeout(PROC_TIMEOUT, totals)
            .await
            .ok()
            .flatten()
    }

    /// Counts a probe of a container.
    pub fn record_probe(&self, container: &str, kind: &'static str, result: &'static str) {
        let key = (container.to_owned(), kind, result);
        *self.probes.borrow_mut().entry(key).or_default() += 1;
    }

    fn probe_counts(&self) -> Vec<ProbeCount> {
        let counts = self.probes.borrow();
        let counts = counts.iter();
        counts
            .map(|((container, kind, result), count)| ProbeCount {
                container: container.clone(),
                kind: (*kind).to_owned(),
                result: (*result).to_owned(),
                count: *count,
            })
            .collect()
    }

    fn container(&self, container: &MeasuredContainer, totals: &ProcessTotals) -> ContainerUsage {
        let cgroup = container.cgroup.as_ref();
        let cgroup = cgroup.and_then(|cgroup| cgroup.usage().ok());
        ContainerUsage {
            name: container.name.clone(),
            id: container.id.clone(),
            started: container.started,
            cpu_ns: match &cgroup {
                Some(usage) => usage.cpu_ns,
                None => self.cpu_ns(&container.id, totals),
            },
            throttling: cgroup.as_ref().and_then(throttling),
            io: match cgroup.as_ref().and_then(|usage| usage.io) {
                Some(counted) => IoUsage {
                    reads: Some(counted.reads),
                    read_bytes: Some(counted.read_bytes),
                    writes: Some(counted.writes),
                    written_bytes: Some(counted.written_bytes),
                },
                None => self.io_bytes(&container.id, totals),
            },
            memory: match &cgroup {
                Some(usage) => memory(usage, totals),
                None => totals.memory,
            },
            processes: totals.processes,
            root: None,
            logs: None,
        }
    }

    fn cpu_ns(&self, id: &str, totals: &ProcessTotals) -> u64 {
        let used = u64::try_from(totals.cpu.as_nanos()).unwrap_or(u64::MAX);
        let mut counters = self.cpu.borrow_mut();
        counters.entry(id.to_owned()).or_default().record(used)
    }

    /// IO summed over processes. The kernel counts the number of disk operations per cgroup only.
    fn io_bytes(&self, id: &str, totals: &ProcessTotals) -> IoUsage {
        let Some(bytes) = totals.disk else {
            return IoUsage::default();
        };
        let mut counters = self.disk_bytes.borrow_mut();
        let (read, written) = counters.entry(id.to_owned()).or_default();
        IoUsage {
            read_bytes: Some(read.record(bytes.read)),
            written_bytes: Some(written.record(bytes.written)),
            ..IoUsage::default()
        }
    }
}

fn throttling(cgroup: &CgroupUsage) -> Option<ThrottlingUsage> {
    cgroup.throttling.map(|counted| ThrottlingUsage {
        periods: counted.periods,
        throttled_periods: counted.throttled_periods,
        throttled_ns: counted.throttled_ns,
    })
}

/// Memory of a cgroup, or of its processes if the cgroup has no memory controller.
fn memory(cgroup: &CgroupUsage, processes: &ProcessTotals) -> MemoryUsage {
    if cgroup.memory == 0 {
        return processes.memory;
    }
    MemoryUsage {
        usage: cgroup.memory,
        working_set: cgroup.working_set,
        rss: cgroup.rss,
        page_faults: cgroup.page_faults.0,
        major_page_faults: cgroup.page_faults.1,
        swap: cgroup.swap.or(processes.memory.swap),
    }
}

fn interfaces(inner: i32) -> Vec<InterfaceUsage> {
    let traffic = |found: linux::usage::TrafficCounters| TrafficUsage {
        bytes: found.bytes,
        packets: found.packets,
        errors: found.errors,
        dropped: found.dropped,
    };
    linux::usage::interfaces(inner)
        .into_iter()
        .filter(|interface| interface.name != "lo")
        .map(|interface| InterfaceUsage {
            name: interface.name,
            received: traffic(interface.received),
            sent: traffic(interface.sent),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn process_is_measured_as_container() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let home = tempfile::tempdir().unwrap();
                let mut process = std::process::Command::new("sleep")
                    .arg("60")
                    .spawn()
                    .unwrap();
                let pid = process.id() as i32;
                let container = MeasuredContainer {
                    name: "main".to_owned(),
                    id: "1".to_owned(),
                    pid,
                    started: Timestamp::now(),
                    root: home.path().to_owned(),
                    logs: home.path().join("none"),
                    cgroup: None,
                };
                let volume = MeasuredVolume {
                    name: "v".to_owned(),
                    path: home.path().to_owned(),
                    whole_file_system: true,
                };
                let meter = UsageMeter::default();
                let usage = meter
                    .measure(
                        pid,
                        None,
                        false,
                        &[container],
                        std::slice::from_ref(&volume),
                        home.path(),
                    )
                    .await
                    .unwrap();
                process.kill().unwrap();
                process.wait().unwrap();
                let main = &usage.containers[0];
                assert_eq!((main.processes, usage.processes), (1, 1));
                // Not compared with each other: the process may grow between the two reads.
                assert!(main.memory.working_set > 0 && usage.memory.working_set > 0);
                assert!(main.io.read_bytes.is_some() && main.io.reads.is_none());
                assert!(main.memory.swap.is_some() && main.throttling.is_none());
                assert!(main.root.is_some() && main.logs.is_none() && usage.etc.is_some());
                assert!(usage.volumes[0].disk.file_system.capacity > 0);
            })
            .await;
    }
}
