//! Detects whether a container was killed by the OOM killer.
//!
//! The container's own cgroup has an exact counter. Without one there is only the `oom_kill` counter of the job's cgroup, or of the
//! machine, which does not name the killed process. A SIGKILL that is not ours, within seconds of an increment of that counter, is
//! taken for an OOM kill. That is wrong only if a container is killed by hand while the OOM killer kills something else.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use linux::cgroup::Cgroup;

use super::inner::message::ProcessExit;

/// Interval at which the counter is sampled. The exit of a killed container is handled within two intervals.
const OOM_SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// Watches one container.
#[derive(Debug)]
pub struct OomWatch {
    cgroup: Option<Cgroup>,
    /// OOM kills of the job or machine; used without a cgroup.
    kills: Rc<RecentCounter>,
    killed_by_runtime: Cell<bool>,
}

/// The last two samples of a counter.
#[derive(Debug)]
struct RecentCounter {
    before: Cell<u64>,
    last: Cell<u64>,
}

impl RecentCounter {
    fn new(count: u64) -> Self {
        Self {
            before: Cell::new(count),
            last: Cell::new(count),
        }
    }

    fn sample(&self, count: u64) {
        self.before.set(self.last.replace(count));
    }

    /// Whether `count` is higher than one to two intervals ago.
    fn has_increased(&self, count: u64) -> bool {
        count > self.before.get()
    }
}

impl OomWatch {
    /// Must be called before the container starts; `cgroup` is its own.
    pub fn new(cgroup: Option<Cgroup>) -> Self {
        let kills = match cgroup {
            Some(_) => Rc::new(RecentCounter::new(0)),
            None => sample_kills(),
        };
        Self {
            cgroup,
            kills,
            killed_by_runtime: Cell::new(false),
        }
    }

    /// The container's own cgroup.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }

    /// Must be called when the runtime itself sends SIGKILL.
    pub fn set_killed_by_runtime(&self) {
        self.killed_by_runtime.set(true);
    }

    /// Whether a container that exited with `code` was OOM-killed. The code is compared rather than the signal, because the first
    /// process may be a shell that reports the death of its child.
    pub fn is_oom_kill(&self, code: i32) -> bool {
        code == ProcessExit::SIGKILL.code && !self.killed_by_runtime.get() && self.has_oom_kill()
    }

    fn has_oom_kill(&self) -> bool {
        match &self.cgroup {
            Some(cgroup) => cgroup.oom_kills().is_some_and(|count| count > 0),
            None => self.kills.has_increased(oom_kills()),
        }
    }
}

/// Samples the counter until the returned value is dropped.
fn sample_kills() -> Rc<RecentCounter> {
    let counter = Rc::new(RecentCounter::new(oom_kills()));
    let weak = Rc::downgrade(&counter);
    tokio::task::spawn_local(async move {
        loop {
            tokio::time::sleep(OOM_SAMPLE_INTERVAL).await;
            let Some(counter) = weak.upgrade() else {
                return;
            };
            counter.sample(oom_kills());
        }
    });
    counter
}

/// The `oom_kill` counter of the nearest cgroup that has one, usually the Slurm job's, else of the machine.
fn oom_kills() -> u64 {
    let text = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    v1_oom_control(&text)
        .and_then(|file| parse_oom_kill(&std::fs::read_to_string(file).ok()?))
        .or_else(linux::cgroup::nearest_oom_kills)
        .or_else(|| parse_oom_kill(&std::fs::read_to_string("/proc/vmstat").ok()?))
        .unwrap_or(0)
}

/// The path of `memory.oom_control` of cgroup v1, given `/proc/PID/cgroup`.
fn v1_oom_control(cgroup: &str) -> Option<PathBuf> {
    let path = cgroup.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let has_memory = controllers.split(',').any(|name| name == "memory");
        has_memory.then(|| path.trim_start_matches('/'))
    })?;
    let root = Path::new("/sys/fs/cgroup/memory");
    Some(root.join(path).join("memory.oom_control"))
}

fn parse_oom_kill(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGKILL_CODE: i32 = ProcessExit::SIGKILL.code;

    #[test]
    fn kill_by_runtime_is_no_oom_kill() {
        let dir = tempfile::tempdir().unwrap();
        let events = dir.path().join("memory.events");
        let watch = || OomWatch::new(Some(Cgroup::at(dir.path())));
        std::fs::write(&events, "oom_kill 0\n").unwrap();
        assert!(!watch().is_oom_kill(SIGKILL_CODE));
        std::fs::write(&events, "oom_kill 2\n").unwrap();
        assert!(watch().is_oom_kill(SIGKILL_CODE));
        assert!(!watch().is_oom_kill(1));
        let ours = watch();
        ours.set_killed_by_runtime();
        assert!(!ours.is_oom_kill(SIGKILL_CODE));
    }

    #[test]
    fn old_oom_kill_is_ignored() {
        let counter = RecentCounter::new(3);
        assert!(!counter.has_increased(3));
        assert!(counter.has_increased(4));
        // The kill is followed by a sample before the exit is handled.
        counter.sample(4);
        assert!(counter.has_increased(4));
        counter.sample(4);
        assert!(!counter.has_increased(4));
        assert!(counter.has_increased(5));
    }

    #[test]
    fn oom_control_path_of_cgroup_v1() {
        assert_eq!(
            v1_oom_control("5:cpu,memory:/slurm/job_1\n0::/user.slice\n").as_deref(),
            Some(Path::new(
                "/sys/fs/cgroup/memory/slurm/job_1/memory.oom_control"
            ))
        );
        assert_eq!(v1_oom_control("0::/user.slice\n"), None);
        assert_eq!(v1_oom_control("odd\n"), None);
        assert_eq!(
            parse_oom_kill("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
            Some(3)
        );
        assert_eq!(parse_oom_kill("low 0\noom 1\n"), None);
    }
}
