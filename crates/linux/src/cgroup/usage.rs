//! What the processes of a group use.

use std::io;

use super::Group;

/// What the processes of a group, and of those below it, use and have used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nanoseconds of processors, since the group was made.
    pub cpu_ns: u64,
    /// How its limit of processors held it back; `None` where nobody counts it.
    pub throttling: Option<Throttling>,
    /// Bytes of memory now, files in memory included.
    pub memory: u64,
    /// Of these, what can't be taken away at once: without files that nobody has read lately. This is what limits are compared with.
    pub working_set: u64,
    /// Of these, memory of processes alone.
    pub rss: u64,
    /// Bytes that were put out to swap; `None` where nobody counts them.
    pub swap: Option<u64>,
    /// What went to disks and came from them; `None` where nobody counts it.
    pub io: Option<Io>,
    /// The most bytes ever; `None` on kernels older than 5.19.
    pub peak: Option<u64>,
    /// Processes and threads now.
    pub processes: u64,
    /// Page faults since the group was made, and those that had to read.
    pub page_faults: (u64, u64),
}

/// How a limit of processors held a group back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    /// Periods in which something of the group wanted to run.
    pub periods: u64,
    /// Of these, those in which its limit held it back.
    pub throttled_periods: u64,
    /// For how long, in nanoseconds.
    pub throttled_ns: u64,
}

/// What went to disks and came from them, all disks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Io {
    /// How often it was read.
    pub reads: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// How often it was written.
    pub writes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
}

impl Usage {
    /// Reads it. What isn't counted, for want of its controller, is zero or `None`.
    pub(super) fn read(group: &Group) -> io::Result<Self> {
        // Always there, with the controller or without.
        let cpu = group.read("cpu.stat")?;
        let optional = |file: &str| group.read(file).unwrap_or_default();
        let number = |file: &str| optional(file).trim().parse::<u64>().ok();
        let counted = Self::of(
            &cpu,
            &optional("memory.stat"),
            number("memory.current").unwrap_or(0),
            number("memory.peak"),
            number("pids.current").unwrap_or(0),
        );
        Ok(Self {
            swap: number("memory.swap.current"),
            io: group.read("io.stat").ok().map(|text| Io::of(&text)),
            ..counted
        })
    }

    fn of(cpu_text: &str, memory: &str, current: u64, peak: Option<u64>, processes: u64) -> Self {
        let cpu = |name| field(cpu_text, name).unwrap_or(0);
        let stat = |name| field(memory, name).unwrap_or(0);
        Self {
            cpu_ns: cpu("usage_usec").saturating_mul(1000),
            throttling: Throttling::of(cpu_text),
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

impl Throttling {
    /// The text of `cpu.stat`, which has these lines with the controller only.
    fn of(text: &str) -> Option<Self> {
        Some(Self {
            periods: field(text, "nr_periods")?,
            throttled_periods: field(text, "nr_throttled")?,
            throttled_ns: field(text, "throttled_usec")?.saturating_mul(1000),
        })
    }
}

impl Io {
    /// The text of `io.stat`: a line for each disk, such as `8:0 rbytes=90112 wbytes=4096 rios=3 wios=1 dbytes=0 dios=0`.
    fn of(text: &str) -> Self {
        let mut sum = Self::default();
        for (name, value) in text
            .split_whitespace()
            .filter_map(|word| word.split_once('='))
        {
            let of = match name {
                "rios" => &mut sum.reads,
                "rbytes" => &mut sum.read_bytes,
                "wios" => &mut sum.writes,
                "wbytes" => &mut sum.written_bytes,
                _ => continue,
            };
            *of = of.saturating_add(value.parse().unwrap_or(0));
        }
        sum
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
        let cpu = "usage_usec 2500\nuser_usec 2000\nsystem_usec 500\nnr_periods 9\nnr_throttled 3\nthrottled_usec 70\n";
        let memory = "anon 4096\nfile 8192\ninactive_file 1000\npgfault 12\npgmajfault 1\n";
        let usage = Usage::of(cpu, memory, 12_288, Some(20_000), 3);
        assert_eq!(
            usage,
            Usage {
                cpu_ns: 2_500_000,
                throttling: Some(Throttling {
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
        assert_eq!(Usage::of("", "", 0, None, 0), Usage::default());
        assert_eq!(Throttling::of("usage_usec 2500\n"), None);
    }

    #[test]
    fn all_disks_count() {
        let text = "8:0 rbytes=90112 wbytes=4096 rios=3 wios=1 dbytes=7 dios=7\n259:1 \n253:0 rbytes=8 wbytes=16 rios=1 wios=2\n";
        let sum = Io {
            reads: 4,
            read_bytes: 90_120,
            writes: 3,
            written_bytes: 4112,
        };
        assert_eq!(Io::of(text), sum);
        assert_eq!(Io::of(""), Io::default());
    }

    #[test]
    fn names_are_whole() {
        let events = "oom 1\noom_kill 2\noom_group_kill 3\nodd\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field(events, "oom_k"), None);
        assert_eq!(field(events, "odd"), None);
    }
}
