//! What the processes of a group use.

use std::io;

use super::Group;

/// What the processes of a group, and of those below it, use and have used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nanoseconds of processors, since the group was made.
    pub cpu_ns: u64,
    /// Of these, the time in which it was held back by its limit.
    pub throttled_ns: u64,
    /// Bytes of memory now, files in memory included.
    pub memory: u64,
    /// Of these, what can't be taken away at once: without files that nobody has read lately. This is what limits are compared with.
    pub working_set: u64,
    /// Of these, memory of processes alone.
    pub rss: u64,
    /// The most bytes ever; `None` on kernels older than 5.19.
    pub peak: Option<u64>,
    /// Processes and threads now.
    pub processes: u64,
    /// Page faults since the group was made, and those that had to read.
    pub page_faults: (u64, u64),
}

impl Usage {
    /// Reads it. What isn't counted, for want of its controller, is zero.
    pub(super) fn read(group: &Group) -> io::Result<Self> {
        // Always there, with the controller or without.
        let cpu = group.read("cpu.stat")?;
        let optional = |file: &str| group.read(file).unwrap_or_default();
        let number = |file: &str| optional(file).trim().parse::<u64>().ok();
        Ok(Self::of(
            &cpu,
            &optional("memory.stat"),
            number("memory.current").unwrap_or(0),
            number("memory.peak"),
            number("pids.current").unwrap_or(0),
        ))
    }

    fn of(cpu: &str, memory: &str, current: u64, peak: Option<u64>, processes: u64) -> Self {
        let cpu = |name| field(cpu, name).unwrap_or(0);
        let stat = |name| field(memory, name).unwrap_or(0);
        Self {
            cpu_ns: cpu("usage_usec").saturating_mul(1000),
            throttled_ns: cpu("throttled_usec").saturating_mul(1000),
            memory: current,
            working_set: current.saturating_sub(stat("inactive_file")),
            rss: stat("anon"),
            peak,
            processes,
            page_faults: (stat("pgfault"), stat("pgmajfault")),
        }
    }
}

/// A number of a file with lines such as `oom_kill 3`.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(' ')?;
        (found == name).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read() {
        let cpu =
            "usage_usec 2500\nuser_usec 2000\nsystem_usec 500\nnr_throttled 3\nthrottled_usec 70\n";
        let memory = "anon 4096\nfile 8192\ninactive_file 1000\npgfault 12\npgmajfault 1\n";
        let usage = Usage::of(cpu, memory, 12_288, Some(20_000), 3);
        assert_eq!(
            usage,
            Usage {
                cpu_ns: 2_500_000,
                throttled_ns: 70_000,
                memory: 12_288,
                working_set: 11_288,
                rss: 4096,
                peak: Some(20_000),
                processes: 3,
                page_faults: (12, 1),
            }
        );
        assert_eq!(Usage::of("", "", 0, None, 0), Usage::default());
    }

    #[test]
    fn names_are_whole() {
        let events = "oom 1\noom_kill 2\noom_group_kill 3\nodd\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field(events, "oom_k"), None);
        assert_eq!(field(events, "odd"), None);
    }
}
