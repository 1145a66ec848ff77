//! Which processes are a container's, and what they use, by what `/proc` tells.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use linux::usage::{DiskBytes, Memory, Table};
use pod_protocol::usage::MemoryUsage;

/// The pod's processes at one moment.
pub(super) struct PodProcesses {
    table: Table,
    /// All of the pod.
    all: HashSet<i32>,
    /// By process: the mount namespace that it is in, which each container has one of.
    mounts: HashMap<i32, PathBuf>,
}

/// What some processes use together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Together {
    pub cpu: Duration,
    pub memory: MemoryUsage,
    pub processes: u64,
    /// `None` if it can't be told of any of them.
    pub disk: Option<DiskBytes>,
}

impl PodProcesses {
    /// Looks at the inner process and all below it. The inner process hides: where `/proc` is mounted with `hidepid`, it is left out.
    pub(super) fn look(inner: i32) -> Self {
        let table = Table::below(inner).or_else(|| Table::read().ok());
        let table = table.unwrap_or_default();
        let all = table.tree([inner]);
        let mounts = all
            .iter()
            .filter_map(|&pid| Some((pid, mount_namespace(pid)?)))
            .collect();
        Self { table, all, mounts }
    }

    /// What the container with this first process uses: those in its mount namespace, among them commands that were
    /// run in it, and all that descend from one of those.
    pub(super) fn of_container(&self, first: i32) -> Together {
        let own = self.mounts.get(&first);
        let same = |pid: &i32| own.is_some() && self.mounts.get(pid) == own;
        let roots = self.all.iter().copied().filter(same).chain([first]);
        self.add_up(&self.table.tree(roots))
    }

    /// What the whole pod uses, and what has ended of it: the inner process is the parent of all.
    pub(super) fn of_pod(&self) -> Together {
        self.add_up(&self.all)
    }

    fn add_up(&self, pids: &HashSet<i32>) -> Together {
        let mut sum = Together {
            cpu: self.table.cpu(pids),
            ..Together::default()
        };
        for (pid, sample) in pids
            .iter()
            .filter_map(|pid| Some((pid, self.table.get(*pid)?)))
        {
            let memory = Memory::of(*pid, sample);
            sum.memory.usage += memory.all;
            sum.memory.working_set += memory.all;
            sum.memory.rss += memory.anonymous;
            sum.memory.page_faults += sample.page_faults.0;
            sum.memory.major_page_faults += sample.page_faults.1;
            if let Some(swap) = memory.swap {
                *sum.memory.swap.get_or_insert(0) += swap;
            }
            if let Some(bytes) = DiskBytes::of(*pid) {
                let disk = sum.disk.get_or_insert_default();
                disk.read += bytes.read;
                disk.written += bytes.written;
            }
            sum.processes += 1;
        }
        sum
    }
}

fn mount_namespace(pid: i32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok()
}

#[cfg(test)]
mod tests {
    use linux::monotonic::MonotonicSum;

    use super::*;

    #[test]
    fn work_is_seen_also_when_it_has_ended() {
        // A shell that works, in a child that it waits for, and then stays.
        let mut shell = std::process::Command::new("sh")
            .args([
                "-c",
                "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; exec sleep 60",
            ])
            .spawn()
            .unwrap();
        let pid = shell.id() as i32;
        let mut counter = MonotonicSum::default();
        let (mut used, mut last) = (0, Together::default());
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while used < 50_000_000 && std::time::Instant::now() < end {
            last = PodProcesses::look(pid).of_container(pid);
            let now = counter.note(u64::try_from(last.cpu.as_nanos()).unwrap());
            assert!(now >= used);
            used = now;
            std::thread::sleep(Duration::from_millis(5));
        }
        for pid in Table::read().unwrap().tree([pid]) {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        shell.wait().unwrap();
        assert!(used >= 50_000_000, "{used}");
        assert!(
            last.memory.working_set > 0 && last.processes > 0,
            "{last:?}"
        );
    }
}
