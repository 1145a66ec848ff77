//! Telling a container that was killed for want of memory from one that was killed for another reason.

use std::path::{Path, PathBuf};

/// How often the kernel has killed for want of memory, where we are limited, or on the whole machine if nobody says.
pub fn kills() -> u64 {
    let text = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    places(&text)
        .into_iter()
        .find_map(|file| count(&std::fs::read_to_string(file).ok()?))
        .or_else(|| count(&std::fs::read_to_string("/proc/vmstat").ok()?))
        .unwrap_or(0)
}

/// The files that may say so for this process, given its `/proc/PID/cgroup`.
fn places(cgroup: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let below = path.trim_start_matches('/');
        if controllers.is_empty() {
            for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
                found.push(Path::new(root).join(below).join("memory.events"));
            }
        } else if controllers.split(',').any(|name| name == "memory") {
            found.push(
                Path::new("/sys/fs/cgroup/memory")
                    .join(below)
                    .join("memory.oom_control"),
            );
        }
    }
    found
}

fn count(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_control_groups_are_asked() {
        let found = places("5:cpu,memory:/slurm/job_1\n0::/user.slice\n");
        assert_eq!(
            found[0],
            Path::new("/sys/fs/cgroup/memory/slurm/job_1/memory.oom_control")
        );
        assert_eq!(
            found[1],
            Path::new("/sys/fs/cgroup/user.slice/memory.events")
        );
        assert_eq!(
            count("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
            Some(3)
        );
        assert_eq!(count("low 0\noom 1\n"), None);
    }
}
