//! The limits of a cgroup, and the files that set them.

/// The period of CPU limits.
const PERIOD_US: u64 = 100_000;
/// The kernel's minimum quota.
const MIN_QUOTA_US: u64 = 1_000;

/// Resource limits of a cgroup. `None` means unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Bytes of memory, including the page cache and tmpfs.
    pub memory: Option<u64>,
    /// CPU limit in millicores.
    pub cpu: Option<u64>,
    /// CPU weight relative to sibling cgroups: 1 to 10000.
    pub weight: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
    /// Disables swap.
    pub no_swap: bool,
    /// On OOM the kernel kills all processes of the cgroup, not only one on which others may depend.
    pub oom_group: bool,
}

impl CgroupLimits {
    /// The files to write, with their values.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        let or_max = |limit: Option<u64>| limit.map_or_else(|| "max".to_owned(), |n| n.to_string());
        let quota = self
            .cpu
            .map(|milli| (milli.saturating_mul(PERIOD_US) / 1000).max(MIN_QUOTA_US));
        let mut settings = vec![
            ("memory.max", or_max(self.memory)),
            ("cpu.max", format!("{} {PERIOD_US}", or_max(quota))),
            ("pids.max", or_max(self.processes)),
        ];
        if let Some(weight) = self.weight {
            settings.push(("cpu.weight", weight.to_string()));
        }
        if self.no_swap {
            settings.push(("memory.swap.max", "0".to_owned()));
        }
        if self.oom_group {
            settings.push(("memory.oom.group", "1".to_owned()));
        }
        settings
    }
}

/// Converts CPU shares (version 1) to a weight (version 2), with the formula of the container runtimes. It maps the minimum, the
/// default and the maximum of shares to those of weights (2 → 1, 1024 → 100, 262144 → 10000).
pub fn cpu_weight_from_shares(shares: u64) -> u64 {
    match shares {
        0..=2 => 1,
        262_144.. => 10_000,
        shares => {
            let l = (shares as f64).log2();
            let exponent = (l * l + 125.0 * l) / 612.0 - 7.0 / 34.0;
            (10_f64.powf(exponent).ceil() as u64).clamp(1, 10_000)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_converted_to_weights() {
        let weights =
            [0, 2, 102, 512, 1024, 2048, 8192, 262_144, u64::MAX].map(cpu_weight_from_shares);
        assert_eq!(weights, [1, 1, 17, 59, 100, 174, 532, 10_000, 10_000]);
    }

    #[test]
    fn limits_are_written_as_settings() {
        let limits = CgroupLimits {
            memory: Some(64 << 20),
            cpu: Some(250),
            weight: Some(17),
            processes: None,
            no_swap: true,
            oom_group: true,
        };
        let written: Vec<String> = limits
            .settings()
            .into_iter()
            .map(|(file, value)| format!("{file} {value}"))
            .collect();
        insta::assert_snapshot!(written.join("\n"), @r"
        memory.max 67108864
        cpu.max 25000 100000
        pids.max max
        cpu.weight 17
        memory.swap.max 0
        memory.oom.group 1
        ");
    }

    #[test]
    fn small_cpu_limit_is_raised_to_the_minimum() {
        let cpu = |milli| {
            let limits = CgroupLimits {
                cpu: Some(milli),
                ..CgroupLimits::default()
            };
            limits.settings()[1].1.clone()
        };
        assert_eq!(cpu(1), "1000 100000");
        assert_eq!(cpu(1500), "150000 100000");
        assert_eq!(CgroupLimits::default().settings()[1].1, "max 100000");
    }
}
