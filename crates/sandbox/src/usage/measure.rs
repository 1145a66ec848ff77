//! Puts a pod's figures together.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use linux::cgroup::{Group, Usage};
use linux::monotonic::MonotonicSum;
use pod_protocol::usage::{
    ContainerUsage, InterfaceUsage, IoUsage, MemoryUsage, PodUsage, ProbeCount, ThrottlingUsage,
    TrafficUsage, VolumeUsage,
};

use super::disk::Disk;
use super::processes::{PodProcesses, Together};

/// A container to measure.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Its name.
    pub name: String,
    /// Its id.
    pub id: String,
    /// Its first process, as this process sees it.
    pub first: i32,
    /// When it was started.
    pub started: Timestamp,
    /// Where it keeps what it changes in its image.
    pub root: PathBuf,
    /// Where its logs are.
    pub logs: PathBuf,
    /// Its control group, if it has one.
    pub group: Option<Group>,
}

/// A volume to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSubject {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// It has a file system of its own, or shares one with others of its kind, that is to be told of as a whole.
    pub whole: bool,
}

/// How long it may take to look at processes: one whose memory is on a server that doesn't answer may not be looked at.
const PATIENCE: Duration = Duration::from_secs(5);

/// Measures one pod, again and again.
#[derive(Default)]
pub struct Meter {
    disk: Disk,
    /// Whoever looks at processes has it, also while nobody waits for that any more.
    looking: Arc<tokio::sync::Mutex<()>>,
    /// By container id, and one for the pod under the empty name.
    cpu: RefCell<HashMap<String, MonotonicSum>>,
    /// Bytes from disks and to them, by container id.
    disk_bytes: RefCell<HashMap<String, (MonotonicSum, MonotonicSum)>>,
    /// By container, kind and result.
    probes: RefCell<BTreeMap<(String, &'static str, &'static str), u64>>,
}

impl Meter {
    /// What the pod below the inner process uses now, unless that can't be found out. `group` is the pod's, `host_network` says
    /// that the network isn't its own; `etc` holds its files below /etc.
    pub async fn measure(
        &self,
        inner: i32,
        group: Option<&Group>,
        host_network: bool,
        containers: &[Subject],
        volumes: &[VolumeSubject],
        etc: &Path,
    ) -> Option<PodUsage> {
        let at = Timestamp::now();
        let firsts = containers.iter().map(|subject| subject.first).collect();
        let (together, of_containers) = self.processes(inner, firsts).await?;
        let known: HashSet<&str> = containers.iter().map(|c| c.id.as_str()).collect();
        self.cpu
            .borrow_mut()
            .retain(|id, _| id.is_empty() || known.contains(id.as_str()));
        self.disk_bytes
            .borrow_mut()
            .retain(|id, _| known.contains(id.as_str()));
        let mut measured = Vec::new();
        for (subject, together) in containers.iter().zip(of_containers) {
            let mut usage = self.container(subject, &together);
            usage.root = self.disk.usage(&subject.root).await;
            usage.logs = self.disk.usage(&subject.logs).await;
            measured.push(usage);
        }
        let mut of_volumes = Vec::new();
        for volume in volumes {
            let disk = if volume.whole {
                self.disk.whole(&volume.path).await
            } else {
                self.disk.usage(&volume.path).await
            };
            let name = volume.name.clone();
            of_volumes.extend(disk.map(|disk| VolumeUsage { name, disk }));
        }
        let of_etc = self.disk.usage(etc).await;
        let walked = containers
            .iter()
            .flat_map(|subject| [subject.root.clone(), subject.logs.clone()])
            .chain(volumes.iter().map(|volume| volume.path.clone()))
            .chain([etc.to_owned()]);
        self.disk.retain(&walked.collect());

        let (cpu_ns, memory, count) = match group.and_then(|group| group.usage().ok()) {
            Some(usage) => (usage.cpu_ns, memory(&usage, &together), together.processes),
            None => (
                self.count("", &together),
                together.memory,
                together.processes,
            ),
        };
        Some(PodUsage {
            at,
            containers: measured,
            cpu_ns,
            memory,
            processes: count,
            interfaces: if host_network {
                Vec::new()
            } else {
                // The inner process hides, and is not shown where `/proc` is mounted with `hidepid`.
                let shown = containers.iter().map(|subject| subject.first);
                let mut found = std::iter::once(inner).chain(shown).map(interfaces);
                found.find(|found| !found.is_empty()).unwrap_or_default()
            },
            volumes: of_volumes,
            etc: of_etc,
            probes: self.probes(),
        })
    }

    /// What the pod's processes use, and those of each container, by its first.
    async fn processes(&self, inner: i32, firsts: Vec<i32>) -> Option<(Together, Vec<Together>)> {
        let looking = Arc::clone(&self.looking).lock_owned();
        let looked = async {
            let looking = looking.await;
            // Reading /proc blocks, and this thread is the pod's only one.
            let look = move || {
                let _looking = looking;
                let processes = PodProcesses::look(inner);
                let containers = firsts
                    .into_iter()
                    .map(|first| processes.of_container(first));
                (processes.of_pod(), containers.collect())
            };
            tokio::task::spawn_blocking(look).await.ok()
        };
        tokio::time::timeout(PATIENCE, looked).await.ok().flatten()
    }

    /// Counts a probe of a container.
    pub fn probed(&self, container: &str, kind: &'static str, result: &'static str) {
        let key = (container.to_owned(), kind, result);
        *self.probes.borrow_mut().entry(key).or_default() += 1;
    }

    fn probes(&self) -> Vec<ProbeCount> {
        let counted = self.probes.borrow();
        let all = counted.iter();
        all.map(|((container, kind, result), count)| ProbeCount {
            container: container.clone(),
            kind: (*kind).to_owned(),
            result: (*result).to_owned(),
            count: *count,
        })
        .collect()
    }

    fn container(&self, subject: &Subject, together: &Together) -> ContainerUsage {
        let group = subject.group.as_ref().and_then(|group| group.usage().ok());
        ContainerUsage {
            name: subject.name.clone(),
            id: subject.id.clone(),
            started: subject.started,
            cpu_ns: match &group {
                Some(usage) => usage.cpu_ns,
                None => self.count(&subject.id, together),
            },
            throttling: group.as_ref().and_then(throttling),
            io: match group.as_ref().and_then(|usage| usage.io) {
                Some(counted) => IoUsage {
                    reads: Some(counted.reads),
                    read_bytes: Some(counted.read_bytes),
                    writes: Some(counted.writes),
                    written_bytes: Some(counted.written_bytes),
                },
                None => self.bytes(&subject.id, together),
            },
            memory: match &group {
                Some(usage) => memory(usage, together),
                None => together.memory,
            },
            processes: together.processes,
            root: None,
            logs: None,
        }
    }

    fn count(&self, id: &str, together: &Together) -> u64 {
        let used = u64::try_from(together.cpu.as_nanos()).unwrap_or(u64::MAX);
        let mut counters = self.cpu.borrow_mut();
        counters.entry(id.to_owned()).or_default().note(used)
    }

    /// By processes. How often they read from disks the kernel tells of no single one.
    fn bytes(&self, id: &str, together: &Together) -> IoUsage {
        let Some(bytes) = together.disk else {
            return IoUsage::default();
        };
        let mut counters = self.disk_bytes.borrow_mut();
        let (read, written) = counters.entry(id.to_owned()).or_default();
        IoUsage {
            read_bytes: Some(read.note(bytes.read)),
            written_bytes: Some(written.note(bytes.written)),
            ..IoUsage::default()
        }
    }
}

fn throttling(group: &Usage) -> Option<ThrottlingUsage> {
    group.throttling.map(|counted| ThrottlingUsage {
        periods: counted.periods,
        throttled_periods: counted.throttled_periods,
        throttled_ns: counted.throttled_ns,
    })
}

/// Memory by a control group, or by its processes where the group doesn't count it.
fn memory(group: &Usage, processes: &Together) -> MemoryUsage {
    if group.memory == 0 {
        return processes.memory;
    }
    MemoryUsage {
        usage: group.memory,
        working_set: group.working_set,
        rss: group.rss,
        page_faults: group.page_faults.0,
        major_page_faults: group.page_faults.1,
        swap: group.swap.or(processes.memory.swap),
    }
}

fn interfaces(inner: i32) -> Vec<InterfaceUsage> {
    let traffic = |found: linux::usage::Traffic| TrafficUsage {
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
    async fn a_process_is_measured_as_a_container() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let home = tempfile::tempdir().unwrap();
                let mut process = std::process::Command::new("sleep")
                    .arg("60")
                    .spawn()
                    .unwrap();
                let first = process.id() as i32;
                let subject = Subject {
                    name: "main".to_owned(),
                    id: "1".to_owned(),
                    first,
                    started: Timestamp::now(),
                    root: home.path().to_owned(),
                    logs: home.path().join("none"),
                    group: None,
                };
                let volume = VolumeSubject {
                    name: "v".to_owned(),
                    path: home.path().to_owned(),
                    whole: true,
                };
                let meter = Meter::default();
                let usage = meter
                    .measure(
                        first,
                        None,
                        false,
                        &[subject],
                        std::slice::from_ref(&volume),
                        home.path(),
                    )
                    .await
                    .unwrap();
                process.kill().unwrap();
                process.wait().unwrap();
                let main = &usage.containers[0];
                assert_eq!((main.processes, usage.processes), (1, 1));
                // It may grow between the two looks.
                assert!(main.memory.working_set > 0 && usage.memory.working_set > 0);
                assert!(main.io.read_bytes.is_some() && main.io.reads.is_none());
                assert!(main.memory.swap.is_some() && main.throttling.is_none());
                assert!(main.root.is_some() && main.logs.is_none() && usage.etc.is_some());
                assert!(usage.volumes[0].disk.file_system.capacity > 0);
            })
            .await;
    }
}
