//! Which of `srun`'s options are followed by a value in a word of its own.
//!
//! Needed only to find the first word that is no option. Options that a newer Slurm adds can always be
//! written as `--name=value`.

/// Letters whose value follows: `-N 2` (and `-N2`, which is one word).
const SHORT_WITH_VALUE: &str = "ABbcCdDeFGiJLmMnNopPqrRStTwWx";

/// Long options without a value.
const LONG_ALONE: [&str; 36] = [
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

/// Whether the word after `option` is its value.
pub fn takes_value(option: &str) -> bool {
    if let Some(long) = option.strip_prefix("--") {
        return !long.contains('=') && !LONG_ALONE.contains(&long);
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
    fn as_srun_reads_them() {
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
