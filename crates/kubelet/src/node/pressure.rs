//! Whether a machine is short of memory, disk or process ids. The numbers are those of the whole machine.

use std::path::Path;

use pod_protocol::usage::{FileSystem, HostResources};

/// Minimum of available memory in bytes: upstream's `memory.available<100Mi`.
const MIN_MEMORY: u64 = 100 << 20;
/// Minimum of free disk space in percent: upstream's `nodefs.available<10%`.
const MIN_DISK_PERCENT: u64 = 10;
/// Free disk space in bytes that is sufficient in any case: the scratch disk of a compute node is large, and other users fill it.
const SUFFICIENT_DISK: u64 = 4 << 30;
/// Minimum of free process ids in percent.
const MIN_PID_PERCENT: u64 = 10;

/// Resources that a machine is short of. Each becomes a condition of the Node.
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

/// The shortages of a machine, memory first. A value that is not known is no shortage.
pub(crate) fn shortages(host: &HostResources) -> Vec<Shortage> {
    let memory = host
        .available_memory
        .filter(|&available| available < MIN_MEMORY)
        .map(|available| Shortage {
            resource: EvictionResource::Memory,
            threshold: MIN_MEMORY,
            available,
        });
    let disk = host.scratch.filter(disk_pressure).map(
        |FileSystem {
             capacity,
             available,
             ..
         }| Shortage {
            resource: EvictionResource::Disk,
            threshold: (capacity / 100 * MIN_DISK_PERCENT).min(SUFFICIENT_DISK),
            available,
        },
    );
    memory.into_iter().chain(disk).collect()
}

impl Pressures {
    /// Measures this machine. Without a directory there is no pressure, because then sandboxes run on other machines.
    pub fn read(scratch_dir: Option<&Path>) -> Self {
        scratch_dir.map_or_else(Self::default, |dir| Self::of(&this_machine(dir)))
    }

    fn of(host: &HostResources) -> Self {
        let is_short = |resource| {
            let mut shortages = shortages(host).into_iter();
            shortages.any(|shortage| shortage.resource == resource)
        };
        Self {
            memory: is_short(EvictionResource::Memory),
            disk: is_short(EvictionResource::Disk),
            pid: host
                .tasks
                .is_some_and(|(tasks, max)| below(max.saturating_sub(tasks), max, MIN_PID_PERCENT)),
        }
    }
}

/// Measures this machine.
pub(crate) fn this_machine(scratch_dir: &Path) -> HostResources {
    let status = rustix::fs::statvfs(scratch_dir).ok();
    HostResources {
        available_memory: linux::host_resources::available_memory(),
        scratch: status.map(|status| FileSystem {
            capacity: status.f_blocks.saturating_mul(status.f_frsize),
            available: status.f_bavail.saturating_mul(status.f_frsize),
            inodes: status.f_files,
            inodes_free: status.f_ffree,
        }),
        tasks: linux::host_resources::tasks(),
    }
}

fn disk_pressure(disk: &FileSystem) -> bool {
    below(disk.available, disk.capacity, MIN_DISK_PERCENT) && disk.available < SUFFICIENT_DISK
}

/// Whether `left` is less than `percent` of `total`. Never true for a total of zero, as some file systems report.
fn below(left: u64, total: u64, percent: u64) -> bool {
    u128::from(left) * 100 < u128::from(total) * u128::from(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_minimum_is_no_pressure() {
        assert!(!below(10, 100, 10));
        assert!(below(9, 100, 10));
        assert!(!below(0, 0, 10));
        assert!(!below(u64::MAX, u64::MAX, 10));
    }

    #[test]
    fn large_disk_needs_only_some_free_gigabytes() {
        let disk_pressure = |available: u64, capacity: u64| {
            disk_pressure(&FileSystem {
                available: available << 30,
                capacity: capacity << 30,
                ..FileSystem::default()
            })
        };
        assert!(!disk_pressure(20, 1000));
        assert!(disk_pressure(3, 1000));
        assert!(!disk_pressure(3, 20));
    }

    #[test]
    fn scarce_memory_and_process_ids_are_pressures() {
        let host = |available_memory, tasks| HostResources {
            available_memory: Some(available_memory),
            tasks: Some((tasks, 1000)),
            scratch: None,
        };
        assert_eq!(Pressures::of(&host(MIN_MEMORY, 900)), Pressures::default());
        let short = Pressures::of(&host(MIN_MEMORY - 1, 901));
        assert!(short.memory && short.pid && !short.disk);
        // More tasks than the limit that was lowered later.
        assert!(Pressures::of(&host(MIN_MEMORY, 2000)).pid);
    }

    #[test]
    fn unknown_value_is_no_pressure() {
        assert_eq!(
            Pressures::of(&HostResources::default()),
            Pressures::default()
        );
        assert!(!Pressures::read(Some(Path::new("/no/such/directory"))).disk);
        assert_eq!(Pressures::read(None), Pressures::default());
    }
}
