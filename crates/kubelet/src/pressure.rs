//! Whether this machine runs out of memory, disk or process ids. The numbers are the whole machine's.

use std::fs;
use std::path::Path;

/// Memory is short below this many available bytes: upstream's `memory.available<100Mi`.
const MEMORY_FLOOR: u64 = 100 << 20;
/// The disk is full below this share of its size, in percent: upstream's `nodefs.available<10%` …
const DISK_FLOOR_PERCENT: u64 = 10;
/// … unless this many bytes are left. The scratch of a compute node is large, and filled by others.
const DISK_ENOUGH: u64 = 4 << 30;
/// Process ids are short below this share of their number, in percent.
const PID_FLOOR_PERCENT: u64 = 10;

/// What this machine is short of; each becomes a condition of the Node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressures {
    /// Short of memory.
    pub memory: bool,
    /// Short of local storage.
    pub disk: bool,
    /// Short of process ids.
    pub pid: bool,
}

/// What pods can be ended for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Memory.
    Memory,
    /// Local storage.
    Disk,
}

/// Too little of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    /// Of what.
    pub resource: Resource,
    /// So many bytes would be enough.
    pub threshold: u64,
    /// So many there are.
    pub available: u64,
}

/// What this machine is short of now, memory first.
pub(crate) fn shortages(scratch_dir: &Path) -> Vec<Shortage> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = available_memory(&meminfo)
        .filter(|&available| available < MEMORY_FLOOR)
        .map(|available| Shortage {
            resource: Resource::Memory,
            threshold: MEMORY_FLOOR,
            available,
        });
    let disk = rustix::fs::statvfs(scratch_dir)
        .ok()
        .filter(|disk| disk_pressure(disk.f_bavail, disk.f_blocks, disk.f_frsize))
        .map(|disk| {
            let total = disk.f_blocks.saturating_mul(disk.f_frsize);
            Shortage {
                resource: Resource::Disk,
                threshold: (total / 100 * DISK_FLOOR_PERCENT).min(DISK_ENOUGH),
                available: disk.f_bavail.saturating_mul(disk.f_frsize),
            }
        });
    memory.into_iter().chain(disk).collect()
}

impl Pressures {
    /// Looks at this machine now; what can't be read puts no pressure on anybody.
    pub fn read(scratch_dir: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let disk = rustix::fs::statvfs(scratch_dir).ok();
        Self {
            memory: available_memory(&text("/proc/meminfo"))
                .is_some_and(|available| available < MEMORY_FLOOR),
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
    below(left, total, DISK_FLOOR_PERCENT) && left.saturating_mul(block) < DISK_ENOUGH
}

/// Whether less than `percent` of `total` is `left`; a total of zero is a file system that doesn't count.
fn below(left: u64, total: u64, percent: u64) -> bool {
    u128::from(left) * 100 < u128::from(total) * u128::from(percent)
}

/// The bytes of `MemAvailable`: what can be had without swapping.
fn available_memory(meminfo: &str) -> Option<u64> {
    let value = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Whether the tasks that loadavg counts (`0.00 0.01 0.05 running/TASKS last`) use up the smaller of the two limits.
fn pid_pressure(loadavg: &str, pid_max: &str, threads_max: &str) -> bool {
    let tasks = loadavg
        .split_whitespace()
        .nth(3)
        .and_then(|field| field.split_once('/')?.1.parse::<u64>().ok());
    let limits = [pid_max, threads_max].map(|text| text.trim().parse::<u64>().ok());
    match (tasks, limits.into_iter().flatten().min()) {
        (Some(tasks), Some(limit)) => below(limit.saturating_sub(tasks), limit, PID_FLOOR_PERCENT),
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
        assert!(available_memory(meminfo).unwrap() < MEMORY_FLOOR);
        assert_eq!(available_memory("MemAvailable: lots\n"), None);
        assert_eq!(available_memory(""), None);
    }

    #[test]
    fn a_tenth_left_is_enough() {
        assert!(!below(10, 100, 10));
        assert!(below(9, 100, 10));
        assert!(!below(0, 0, 10));
        assert!(!below(u64::MAX, u64::MAX, 10));
    }

    #[test]
    fn some_gigabytes_of_a_large_disk_are_enough() {
        const GIB: u64 = (1 << 30) / 4096;
        assert!(!disk_pressure(20 * GIB, 1000 * GIB, 4096));
        assert!(disk_pressure(3 * GIB, 1000 * GIB, 4096));
        assert!(!disk_pressure(3 * GIB, 20 * GIB, 4096));
    }

    #[test]
    fn the_smaller_limit_of_process_ids_counts() {
        let loadavg = "0.40 0.62 0.71 3/950 12345\n";
        assert!(!pid_pressure(loadavg, "32768\n", "63000\n"));
        assert!(pid_pressure(loadavg, "32768\n", "1000\n"));
        assert!(pid_pressure(loadavg, "900\n", ""));
        assert!(!pid_pressure("", "900\n", "900\n"));
        assert!(!pid_pressure(loadavg, "", ""));
    }

    #[test]
    fn nothing_readable_is_no_pressure() {
        assert!(!Pressures::read(Path::new("/no/such/directory")).disk);
    }
}
