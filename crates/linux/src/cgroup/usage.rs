//! Resource usage of cgroups.

use std::io;

use super::Cgroup;

/// Resource usage of the processes in a cgroup and its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupUsage {
    /// CPU time in nanoseconds since the cgroup was created.
    pub cpu_ns: u64,
    /// CPU throttling; `None` if the cpu controller is not enabled.
    pub throttling: Option<CpuThrottling>,
    /// Current bytes of memory, including the page cache and tmpfs.
    pub memory: u64,
    /// Memory without inactive files, which the kernel can reclaim at once. This is the value to compare with limits.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Bytes in swap; `None` if the kernel does not account for them.
    pub swap: Option<u64>,
    /// Disk I/O; `None` if the io controller is not enabled.
    pub io: Option<CgroupIo>,
    /// The peak of `memory`; `None` on kernels before 5.19.
    pub peak: Option<u64>,
    /// Current processes and threads.
    pub processes: u64,
    /// Page faults since the cgroup was created: all of them, and the major ones.
    pub page_faults: (u64, u64),
}

/// How a CPU limit throttled a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuThrottling {
    /// Periods in which a process of the cgroup was runnable.
    pub periods: u64,
    /// Periods in which the limit throttled it.
    pub throttled_periods: u64,
    /// Throttled time in nanoseconds.
    pub throttled_ns: u64,
}

/// Disk I/O, the sum over all disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupIo {
    /// Read operations.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Write operations.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

impl CgroupUsage {
    /// Reads the counters. Without its controller a counter is zero or `None`.
    pub(super) fn read(cgroup: &Cgroup) -> io::Result<Self> {
        // This file exists even if the controller is not enabled.
        let cpu = cgroup.read("cpu.stat")?;
        let optional = |file: &str| cgroup.read(file).unwrap_or_default();
        let number = |file: &str| optional(file).trim().parse::<u64>().ok();
        let counters = Self::parse(
            &cpu,
            &optional("memory.stat"),
            number("memory.current").unwrap_or(0),
            number("memory.peak"),
            number("pids.current").unwrap_or(0),
        );
        Ok(Self {
            swap: number("memory.swap.current"),
            io: cgroup
                .read("io.stat")
                .ok()
                .map(|text| CgroupIo::parse(&text)),
            ..counters
        })
    }

    fn parse(
        cpu_text: &str,
        memory: &str,
        current: u64,
        peak: Option<u64>,
        processes: u64,
    ) -> Self {
        let cpu = |name| field(cpu_text, name).unwrap_or(0);
        let stat = |name| field(memory, name).unwrap_or(0);
        Self {
            cpu_ns: cpu("usage_usec").saturating_mul(1000),
            throttling: CpuThrottling::parse(cpu_text),
            swap: None,
            io: None,
            memory: current,
            working_set: current.saturating_sub(stat("inactive_file")),
            rss: stat("anon"),
            peak,
            processes,
            page_faults: (stat("pgfault"), stat("pgmajfault")),
        }
    }
}

impl CpuThrottling {
    /// Parses `cpu.stat`, which contains these lines only if the controller is enabled.
    fn parse(text: &str) -> Option<Self> {
        Some(Self {
            periods: field(text, "nr_periods")?,
            throttled_periods: field(text, "nr_throttled")?,
            throttled_ns: field(text, "throttled_usec")?.saturating_mul(1000),
        })
    }
}

impl CgroupIo {
    /// Parses `io.stat`, which has a line for each disk: `8:0 rbytes=90112 wbytes=4096 rios=3 wios=1 dbytes=0 dios=0`.
    fn parse(text: &str) -> Self {
        let mut sum = Self::default();
        for (name, value) in text
            .split_whitespace()
            .filter_map(|field| field.split_once('='))
        {
            let counter = match name {
                "rios" => &mut sum.reads,
                "rbytes" => &mut sum.read_bytes,
                "wios" => &mut sum.writes,
                "wbytes" => &mut sum.written_bytes,
                _ => continue,
            };
            *counter = counter.saturating_add(value.parse().unwrap_or(0));
        }
        sum
    }
}

/// A value from a file with lines such as `oom_kill 3`.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(' ')?;
        (key == name).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_parsed() {
        let cpu = "usage_usec 2500\nuser_usec 2000\nsystem_usec 500\nnr_periods 9\nnr_throttled 3\nthrottled_usec 70\n";
        let memory = "anon 4096\nfile 8192\ninactive_file 1000\npgfault 12\npgmajfault 1\n";
        let usage = CgroupUsage::parse(cpu, memory, 12_288, Some(20_000), 3);
        assert_eq!(
            usage,
            CgroupUsage {
                cpu_ns: 2_500_000,
                throttling: Some(CpuThrottling {
                    periods: 9,
                    throttled_periods: 3,
                    throttled_ns: 70_000,
                }),
                swap: None,
                io: None,
                memory: 12_288,
                working_set: 11_288,
                rss: 4096,
                peak: Some(20_000),
                processes: 3,
                page_faults: (12, 1),
            }
        );
        assert_eq!(
            CgroupUsage::parse("", "", 0, None, 0),
            CgroupUsage::default()
        );
        assert_eq!(CpuThrottling::parse("usage_usec 2500\n"), None);
    }

    #[test]
    fn io_of_all_disks_is_added_up() {
        let text = "8:0 rbytes=90112 wbytes=4096 rios=3 wios=1 dbytes=7 dios=7\n259:1 \n253:0 rbytes=8 wbytes=16 rios=1 wios=2\n";
        let sum = CgroupIo {
            reads: 4,
            read_bytes: 90_120,
            writes: 3,
            written_bytes: 4112,
        };
        assert_eq!(CgroupIo::parse(text), sum);
        assert_eq!(CgroupIo::parse(""), CgroupIo::default());
    }

    #[test]
    fn field_names_match_exactly() {
        let events = "oom 1\noom_kill 2\noom_group_kill 3\nodd\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field(events, "oom_k"), None);
        assert_eq!(field(events, "odd"), None);
    }
}
