//! Telling a container that was killed for want of memory from one that was killed for another reason.
//!
//! A control group of its own says so exactly. Without one there is only the count of the group that Slurm put us in, or of the
//! machine: a kill that is not ours, while that count went up, was the kernel's.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use linux::cgroup::Group;

/// As a shell says it of a process that was killed.
const KILLED: i32 = 128 + 9;

/// The life of one container, as far as it may end for want of memory.
#[derive(Debug)]
pub struct Watch {
    group: Option<Group>,
    kills_before: u64,
    killed_by_us: Cell<bool>,
}

impl Watch {
    /// Begins before the container does; `group` is its own.
    pub fn new(group: Option<Group>) -> Self {
        let kills_before = match group {
            Some(_) => 0,
            None => kills(),
        };
        Self {
            group,
            kills_before,
            killed_by_us: Cell::new(false),
        }
    }

    /// The container's own group.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// It gets SIGKILL from us.
    pub fn we_kill(&self) {
        self.killed_by_us.set(true);
    }

    /// Whether a container that has ended with `code` was killed for want of memory. The first process of a container may be a
    /// shell that only tells of another's death.
    pub fn was_it(&self, code: i32) -> bool {
        code == KILLED && !self.killed_by_us.get() && self.has_killed()
    }

    fn has_killed(&self) -> bool {
        match &self.group {
            Some(group) => group.oom_kills().is_some_and(|count| count > 0),
            None => kills() > self.kills_before,
        }
    }
}

/// How often the kernel has killed for want of memory, where we are limited (by Slurm, mostly), or on the whole machine if nobody
/// says.
fn kills() -> u64 {
    let text = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    version_one(&text)
        .and_then(|file| count(&std::fs::read_to_string(file).ok()?))
        .or_else(linux::cgroup::nearest_oom_kills)
        .or_else(|| count(&std::fs::read_to_string("/proc/vmstat").ok()?))
        .unwrap_or(0)
}

/// The file of version 1 that may say so for this process, given its `/proc/PID/cgroup`.
fn version_one(cgroup: &str) -> Option<PathBuf> {
    let path = cgroup.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let has_memory = controllers.split(',').any(|name| name == "memory");
        has_memory.then(|| path.trim_start_matches('/'))
    })?;
    let root = Path::new("/sys/fs/cgroup/memory");
    Some(root.join(path).join("memory.oom_control"))
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
    fn only_the_kernels_kills_count() {
        let dir = tempfile::tempdir().unwrap();
        let events = dir.path().join("memory.events");
        let watch = || Watch::new(Some(Group::at(dir.path())));
        std::fs::write(&events, "oom_kill 0\n").unwrap();
        assert!(!watch().was_it(KILLED));
        std::fs::write(&events, "oom_kill 2\n").unwrap();
        assert!(watch().was_it(KILLED));
        assert!(!watch().was_it(1));
        let ours = watch();
        ours.we_kill();
        assert!(!ours.was_it(KILLED));
    }

    #[test]
    fn both_kinds_of_control_groups_are_asked() {
        assert_eq!(
            version_one("5:cpu,memory:/slurm/job_1\n0::/user.slice\n").as_deref(),
            Some(Path::new(
                "/sys/fs/cgroup/memory/slurm/job_1/memory.oom_control"
            ))
        );
        assert_eq!(version_one("0::/user.slice\n"), None);
        assert_eq!(version_one("odd\n"), None);
        assert_eq!(
            count("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
            Some(3)
        );
        assert_eq!(count("low 0\noom 1\n"), None);
    }
}
