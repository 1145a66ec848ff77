//! The options of `srun` that take the next argument as their value.
//!
//! Needed only to find the first argument that is not an option. Users can write unknown options of a newer Slurm
//! as `--name=value`.

/// Short options with a value: `-N 2`. (`-N2` is one argument.)
const SHORT_WITH_VALUE: &str = "ABbcCdDeFGiJLmMnNopPqrRStTwWx";

/// Long options without a separate value.
const LONG_WITHOUT_VALUE: [&str; 36] = [
    "contiguous",
    "disable-status",
    "exact",
    "exclusive",
    "get-user-env",
    "help",
    "hold",
    "ignore-pbs",
    "immediate",
    "interactive",
    "jobid-verbose",
    "kill-on-bad-exit",
    "label",
    "multi-prog",
    "no-allocate",
    "no-kill",
    "no-requeue",
    "nvmps",
    "overcommit",
    "overlap",
    "oversubscribe",
    "preserve-env",
    "propagate",
    "pty",
    "quiet",
    "quit-on-interrupt",
    "reboot",
    "requeue",
    "share",
    "spread-job",
    "test-only",
    "unbuffered",
    "usage",
    "use-min-nodes",
    "version",
    "x11",
];

/// Whether the argument after `option` is its value.
pub fn takes_value(option: &str) -> bool {
    if let Some(long) = option.strip_prefix("--") {
        return !long.contains('=') && !LONG_WITHOUT_VALUE.contains(&long);
    }
    let mut letters = option.chars().skip(1);
    match (letters.next(), letters.next()) {
        (Some(letter), None) => SHORT_WITH_VALUE.contains(letter),
        // The value is attached.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_sruns_option_parsing() {
        for option in [
            "-N",
            "-p",
            "--nodes",
            "--partition",
            "-t",
            "--mem",
            "--gres",
            "-A",
            "-w",
        ] {
            assert!(takes_value(option), "{option}");
        }
        for option in [
            "-N2",
            "--nodes=2",
            "--exclusive",
            "-Q",
            "--overlap",
            "-l",
            "-s",
            "--pty",
        ] {
            assert!(!takes_value(option), "{option}");
        }
    }
}
