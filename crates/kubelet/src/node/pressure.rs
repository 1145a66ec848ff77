//! Whether this machine is short of memory, disk or process ids. The numbers are those of the whole machine.

use std::fs;
use std::path::Path;

/// Minimum of available memory in bytes: upstream's `memory.available<100Mi`.
const MIN_MEMORY: u64 = 100 << 20;
/// Minimum of free disk space in percent: upstream's `nodefs.available<10%`.
const MIN_DISK_PERCENT: u64 = 10;
/// Free disk space in bytes that is sufficient in any case: the scratch disk of a compute node is large, and other users fill it.
const SUFFICIENT_DISK: u64 = 4 << 30;
/// Minimum of free process ids in percent.
const MIN_PID_PERCENT: u64 = 10;

/// Resources that this machine is short of. Each becomes a condition of the Node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressures {
    /// MemoryPressure.
    pub memory: bool,
    /// DiskPressure.
    pub disk: bool,
    /// PIDPressure.
    pub pid: bool,
}

/// A resource for which pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionResource {
    Memory,
    /// Local storage.
    Disk,
}

/// A resource whose available amount is below its eviction threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub resource: EvictionResource,
    /// In bytes.
    pub threshold: u64,
    /// In bytes.
    pub available: u64,
}

/// The current shortages, memory first; none without a directory, because then sandboxes run on other machines.
pub(crate) fn shortages(scratch_dir: Option<&Path>) -> Vec<Shortage> {
    let Some(scratch_dir) = scratch_dir else {
        return vec![];
    };
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = available_memory(&meminfo)
        .filter(|&available| available < MIN_MEMORY)
        .map(|available| Shortage {
            resource: EvictionResource::Memory,
            threshold: MIN_MEMORY,
            available,
        });
    let disk = rustix::fs::statvfs(scratch_dir)
        .ok()
        .filter(|disk| disk_pressure(disk.f_bavail, disk.f_blocks, disk.f_frsize))
        .map(|disk| {
            let total = disk.f_blocks.saturating_mul(disk.f_frsize);
            Shortage {
                resource: EvictionResource::Disk,
                threshold: (total / 100 * MIN_DISK_PERCENT).min(SUFFICIENT_DISK),
                available: disk.f_bavail.saturating_mul(disk.f_frsize),
            }
        });
    memory.into_iter().chain(disk).collect()
}

impl Pressures {
    /// Measures this machine. A value that cannot be read counts as no pressure. Without a directory there is none, because then
    /// sandboxes run on other machines.
    pub fn read(scratch_dir: Option<&Path>) -> Self {
        let Some(scratch_dir) = scratch_dir else {
            return Self::default();
        };
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let disk = rustix::fs::statvfs(scratch_dir).ok();
        Self {
            memory: available_memory(&text("/proc/meminfo"))
                .is_some_and(|available| available < MIN_MEMORY),
            disk: disk
                .is_some_and(|disk| disk_pressure(disk.f_bavail, disk.f_blocks, disk.f_frsize)),
            pid: pid_pressure(
                &text("/proc/loadavg"),
                &text("/proc/sys/kernel/pid_max"),
                &text("/proc/sys/kernel/threads-max"),
            ),
        }
    }
}

fn disk_pressure(left: u64, total: u64, block: u64) -> bool {
    below(left, total, MIN_DISK_PERCENT) && left.saturating_mul(block) < SUFFICIENT_DISK
}

/// Whether `left` is less than `percent` of `total`. Never true for a total of zero, as some file systems report.
fn below(left: u64, total: u64, percent: u64) -> bool {
    u128::from(left) * 100 < u128::from(total) * u128::from(percent)
}

/// `MemAvailable` in bytes.
fn available_memory(meminfo: &str) -> Option<u64> {
    let value = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Compares the number of tasks in loadavg (`0.00 0.01 0.05 running/TASKS last`) with the smaller of the two limits.
fn pid_pressure(loadavg: &str, pid_max: &str, threads_max: &str) -> bool {
    let tasks = loadavg
        .split_whitespace()
        .nth(3)
        .and_then(|field| field.split_once('/')?.1.parse::<u64>().ok());
    let limits = [pid_max, threads_max].map(|text| text.trim().parse::<u64>().ok());
    match (tasks, limits.into_iter().flatten().min()) {
        (Some(tasks), Some(limit)) => below(limit.saturating_sub(tasks), limit, MIN_PID_PERCENT),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_in_bytes() {
        let meminfo =
            "MemTotal:       16303428 kB\nMemFree:          123 kB\nMemAvailable:      102399 kB\n";
        assert_eq!(available_memory(meminfo), Some(102_399 << 10));
        assert!(available_memory(meminfo).unwrap() < MIN_MEMORY);
        assert_eq!(available_memory("MemAvailable: lots\n"), None);
        assert_eq!(available_memory(""), None);
    }

    #[test]
    fn exactly_the_minimum_is_no_pressure() {
        assert!(!below(10, 100, 10));
        assert!(below(9, 100, 10));
        assert!(!below(0, 0, 10));
        assert!(!below(u64::MAX, u64::MAX, 10));
    }

    #[test]
    fn large_disk_needs_only_some_free_gigabytes() {
        const GIB: u64 = (1 << 30) / 4096;
        assert!(!disk_pressure(20 * GIB, 1000 * GIB, 4096));
        assert!(disk_pressure(3 * GIB, 1000 * GIB, 4096));
        assert!(!disk_pressure(3 * GIB, 20 * GIB, 4096));
    }

    #[test]
    fn smaller_pid_limit_decides() {
        let loadavg = "0.40 0.62 0.71 3/950 12345\n";
        assert!(!pid_pressure(loadavg, "32768\n", "63000\n"));
        assert!(pid_pressure(loadavg, "32768\n", "1000\n"));
        assert!(pid_pressure(loadavg, "900\n", ""));
        assert!(!pid_pressure("", "900\n", "900\n"));
        assert!(!pid_pressure(loadavg, "", ""));
    }

    #[test]
    fn unreadable_value_is_no_pressure() {
        assert!(!Pressures::read(Some(Path::new("/no/such/directory"))).disk);
        assert_eq!(Pressures::read(None), Pressures::default());
    }
}
