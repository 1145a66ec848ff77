//! Telling a container that was killed for want of memory from one that was killed for another reason.
//!
//! A control group of its own says so exactly. Without one there is only the count of the group that Slurm put us in, or of the
//! machine, and the kernel tells nobody whom it killed: a kill that is not ours, within seconds of that count going up, was the
//! kernel's. So one by hand is told apart, unless something else that shares the count was short of memory just then.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use linux::cgroup::Group;

/// As a shell says it of a process that was killed.
const KILLED: i32 = 128 + 9;
/// How often the count is looked at. Who is killed has ended long before the next look but one.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The life of one container, as far as it may end for want of memory.
#[derive(Debug)]
pub struct Watch {
    group: Option<Group>,
    /// Of kills by the kernel; without a group of its own.
    count: Rc<Lately>,
    killed_by_us: Cell<bool>,
}

/// What a count was a while ago: at the last look but one, or at the first.
#[derive(Debug)]
struct Lately {
    before: Cell<u64>,
    last: Cell<u64>,
}

impl Lately {
    fn new(count: u64) -> Self {
        Self {
            before: Cell::new(count),
            last: Cell::new(count),
        }
    }

    fn look(&self, count: u64) {
        self.before.set(self.last.replace(count));
    }

    fn went_up_to(&self, count: u64) -> bool {
        count > self.before.get()
    }
}

impl Watch {
    /// Begins before the container does; `group` is its own.
    pub fn new(group: Option<Group>) -> Self {
        let count = match group {
            Some(_) => Rc::new(Lately::new(0)),
            None => counted(),
        };
        Self {
            group,
            count,
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
            None => self.count.went_up_to(kills()),
        }
    }
}

/// Begins to look at the count, for as long as somebody asks.
fn counted() -> Rc<Lately> {
    let count = Rc::new(Lately::new(kills()));
    let asked = Rc::downgrade(&count);
    tokio::task::spawn_local(async move {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(count) = asked.upgrade() else { return };
            count.look(kills());
        }
    });
    count
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
    fn a_kill_long_ago_is_not_the_cause() {
        let count = Lately::new(3);
        assert!(!count.went_up_to(3));
        assert!(count.went_up_to(4));
        // Just before the end, with a look in between.
        count.look(4);
        assert!(count.went_up_to(4));
        count.look(4);
        assert!(!count.went_up_to(4));
        assert!(count.went_up_to(5));
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
