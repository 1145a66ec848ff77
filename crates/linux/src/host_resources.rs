//! Free memory and process ids of the whole machine.

use std::fs;

/// `MemAvailable` in bytes; `None` if it cannot be read.
pub fn available_memory() -> Option<u64> {
    parse_available_memory(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// The number of tasks (processes and threads), and their maximum; `None` if one of them cannot be read.
pub fn tasks() -> Option<(u64, u64)> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    parse_tasks(
        &text("/proc/loadavg"),
        &text("/proc/sys/kernel/pid_max"),
        &text("/proc/sys/kernel/threads-max"),
    )
}

fn parse_available_memory(meminfo: &str) -> Option<u64> {
    let value = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The number is in loadavg (`0.00 0.01 0.05 running/TASKS last`). The maximum is the smaller of the two limits.
fn parse_tasks(loadavg: &str, pid_max: &str, threads_max: &str) -> Option<(u64, u64)> {
    let field = loadavg.split_whitespace().nth(3)?;
    let tasks = field.split_once('/')?.1.parse().ok()?;
    let limits = [pid_max, threads_max].map(|text| text.trim().parse::<u64>().ok());
    Some((tasks, limits.into_iter().flatten().min()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_in_bytes() {
        let meminfo =
            "MemTotal:       16303428 kB\nMemFree:          123 kB\nMemAvailable:      102399 kB\n";
        assert_eq!(parse_available_memory(meminfo), Some(102_399 << 10));
        assert_eq!(parse_available_memory("MemAvailable: lots\n"), None);
        assert_eq!(parse_available_memory(""), None);
    }

    #[test]
    fn smaller_limit_is_the_maximum_of_tasks() {
        let loadavg = "0.40 0.62 0.71 3/950 12345\n";
        assert_eq!(
            parse_tasks(loadavg, "32768\n", "63000\n"),
            Some((950, 32768))
        );
        assert_eq!(parse_tasks(loadavg, "32768\n", "1000\n"), Some((950, 1000)));
        assert_eq!(parse_tasks(loadavg, "900\n", ""), Some((950, 900)));
        assert_eq!(parse_tasks("", "900\n", "900\n"), None);
        assert_eq!(parse_tasks(loadavg, "", ""), None);
    }

    #[test]
    fn this_machine_is_read() {
        assert!(available_memory().is_some_and(|bytes| bytes > 0));
        assert!(tasks().is_some_and(|(tasks, max)| 0 < tasks && tasks < max));
    }
}
