//! The processes of a pod and their resource usage, from `/proc`.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use linux::usage::{DiskBytes, ProcessMemory, ProcessTable};
use pod_protocol::usage::MemoryUsage;

/// A snapshot of the pod's processes.
pub(super) struct PodProcesses {
    table: ProcessTable,
    /// Pids of all processes of the pod.
    all: HashSet<i32>,
    /// The mount namespace by pid. Each container has its own.
    mount_namespaces: HashMap<i32, PathBuf>,
}

/// Resource usage summed over processes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ProcessTotals {
    pub cpu: Duration,
    pub memory: MemoryUsage,
    pub processes: u64,
    /// `None` if it is unknown for all of them.
    pub disk: Option<DiskBytes>,
}

impl PodProcesses {
    /// Reads the inner process and its descendants. The inner process is not dumpable, so it is missing with `hidepid`.
    pub(super) fn read(inner: i32) -> Self {
        let table = ProcessTable::read_subtree(inner).or_else(|| ProcessTable::read().ok());
        let table = table.unwrap_or_default();
        let all = table.subtree([inner]);
        let mount_namespaces = all
            .iter()
            .filter_map(|&pid| Some((pid, mount_namespace(pid)?)))
            .collect();
        Self {
            table,
            all,
            mount_namespaces,
        }
    }

    /// Sums up the container with this first process: the processes in its mount namespace, which include exec commands, and their
    /// descendants.
    pub(super) fn container_totals(&self, first: i32) -> ProcessTotals {
        let own = self.mount_namespaces.get(&first);
        let same = |pid: &i32| own.is_some() && self.mount_namespaces.get(pid) == own;
        let roots = self.all.iter().copied().filter(same).chain([first]);
        self.sum(&self.table.subtree(roots))
    }

    /// Sums up the pod. CPU time includes exited processes, because the inner process reaps them.
    pub(super) fn pod_totals(&self) -> ProcessTotals {
        self.sum(&self.all)
    }

    fn sum(&self, pids: &HashSet<i32>) -> ProcessTotals {
        let mut totals = ProcessTotals {
            cpu: self.table.cpu(pids),
            ..ProcessTotals::default()
        };
        for (pid, sample) in pids
            .iter()
            .filter_map(|pid| Some((pid, self.table.get(*pid)?)))
        {
            let memory = ProcessMemory::of(*pid, sample);
            totals.memory.usage += memory.all;
            totals.memory.working_set += memory.all;
            totals.memory.rss += memory.anonymous;
            totals.memory.page_faults += sample.page_faults.0;
            totals.memory.major_page_faults += sample.page_faults.1;
            if let Some(swap) = memory.swap {
                *totals.memory.swap.get_or_insert(0) += swap;
            }
            if let Some(bytes) = DiskBytes::of(*pid) {
                let disk = totals.disk.get_or_insert_default();
                disk.read += bytes.read;
                disk.written += bytes.written;
            }
            totals.processes += 1;
        }
        totals
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
    fn cpu_time_includes_exited_children() {
        // A shell that burns CPU time in a child, waits for it, and then sleeps.
        let mut shell = std::process::Command::new("sh")
            .args([
                "-c",
                "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; exec sleep 60",
            ])
            .spawn()
            .unwrap();
        let pid = shell.id() as i32;
        let mut counter = MonotonicSum::default();
        let (mut used, mut last) = (0, ProcessTotals::default());
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while used < 50_000_000 && std::time::Instant::now() < end {
            last = PodProcesses::read(pid).container_totals(pid);
            let now = counter.record(u64::try_from(last.cpu.as_nanos()).unwrap());
            assert!(now >= used);
            used = now;
            std::thread::sleep(Duration::from_millis(5));
        }
        for pid in ProcessTable::read().unwrap().subtree([pid]) {
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
