//! Cgroups (version 2) of an unprivileged user to whom a part of the hierarchy is delegated.
//!
//! A [`Cgroup`] is a directory of the cgroup file system. To limit processes, a program needs a delegated cgroup
//! ([`DelegatedCgroup`]). It then creates child cgroups, sets [`CgroupLimits`], forks processes into them
//! ([`crate::clone::fork_into_cgroup`]), reads [`CgroupUsage`], and removes them.
//!
//! Start reading at [`Cgroup`] and [`DelegatedCgroup`].

mod delegation;
mod limits;
mod locate;
mod usage;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use delegation::{DelegatedCgroup, DelegationError};
pub use limits::{CgroupLimits, cpu_weight_from_shares};
pub use usage::{CgroupIo, CgroupUsage, CpuThrottling};

use rustix::fs::{Access, CWD, Mode, OFlags};

/// Interval between attempts to remove a cgroup. A killed process leaves its cgroup only after the kernel has released its
/// resources.
const REMOVE_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A cgroup, by its directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// The cgroup of this process; `None` if no cgroup of version 2 is visible.
    pub fn own() -> Option<Self> {
        let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        locate::candidate_dirs(&membership, &mounts)
            .into_iter()
            .find(|path| path.join("cgroup.procs").exists())
            .map(Self)
    }

    /// The cgroup with this directory.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A child cgroup, which may not exist.
    pub fn child(&self, name: &str) -> Self {
        Self(self.0.join(name))
    }

    /// Creates the cgroup if it does not exist.
    pub fn create(&self) -> io::Result<()> {
        match std::fs::create_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            created => created,
        }
    }

    /// Whether it is delegated to us: we may create child cgroups, enable controllers for them, and move processes between them.
    pub fn is_delegated(&self) -> bool {
        let may_write = |path: &Path| rustix::fs::access(path, Access::WRITE_OK).is_ok();
        may_write(&self.0)
            && ["cgroup.procs", "cgroup.subtree_control"]
                .iter()
                .all(|file| may_write(&self.0.join(file)))
    }

    /// The controllers that it can enable for child cgroups.
    pub fn controllers(&self) -> Vec<String> {
        let text = self.read("cgroup.controllers").unwrap_or_default();
        text.split_whitespace().map(str::to_owned).collect()
    }

    /// The processes in it, without those in child cgroups. A process that is not in our pid namespace is listed as 0.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let text = self.read("cgroup.procs")?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// The child cgroups.
    pub fn children(&self) -> Vec<Self> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| Self(entry.path()))
            .collect()
    }

    /// Moves the calling process with all of its threads to this cgroup.
    pub fn enter(&self) -> io::Result<()> {
        self.write("cgroup.procs", "0")
    }

    /// Enables controllers for child cgroups. The kernel refuses while this cgroup contains processes.
    pub fn enable_controllers(&self, controllers: &[String]) -> io::Result<()> {
        self.write_subtree_control(controllers, '+')
    }

    /// Disables controllers for child cgroups, after which this cgroup may contain processes again.
    pub fn disable_controllers(&self, controllers: &[String]) -> io::Result<()> {
        self.write_subtree_control(controllers, '-')
    }

    fn write_subtree_control(&self, controllers: &[String], sign: char) -> io::Result<()> {
        let changes: Vec<String> = controllers.iter().map(|c| format!("{sign}{c}")).collect();
        self.write("cgroup.subtree_control", &changes.join(" "))
    }

    /// Sets the limits of the cgroup. Limits without an enabled controller are skipped.
    pub fn set_limits(&self, limits: &CgroupLimits) -> io::Result<()> {
        for (file, value) in limits.settings() {
            match self.write(file, &value) {
                // The controller is not enabled, or the kernel is older than the file.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                written => written?,
            }
        }
        Ok(())
    }

    /// How many processes of it and its descendants were OOM-killed. `None` without the memory controller.
    pub fn oom_kills(&self) -> Option<u64> {
        usage::field(&self.read("memory.events").ok()?, "oom_kill")
    }

    /// Reads the resource usage of its processes.
    pub fn usage(&self) -> io::Result<CgroupUsage> {
        CgroupUsage::read(self)
    }

    /// The effective limit on processes: the smallest `pids.max` of this cgroup and its ancestors.
    pub fn pids_max(&self) -> Option<u64> {
        let limit = |dir: &Path| -> Option<u64> {
            let text = std::fs::read_to_string(dir.join("pids.max")).ok()?;
            text.trim().parse().ok()
        };
        self.0.ancestors().filter_map(limit).min()
    }

    /// Kills all processes in it and in its descendants. Needs Linux 5.14; errors are ignored.
    pub fn kill(&self) {
        let _ = self.write("cgroup.kill", "1");
    }

    /// Removes it and its child cgroups. Fails while one of them contains a process.
    pub fn remove(&self) -> io::Result<()> {
        for cgroup in self.children() {
            cgroup.remove()?;
        }
        match std::fs::remove_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Like [`Cgroup::remove`], but retries until `timeout` has passed, because killed processes take time to exit. Blocks.
    pub fn remove_with_retries(&self, timeout: Duration) -> io::Result<()> {
        let began = Instant::now();
        loop {
            match self.remove() {
                Err(_) if began.elapsed() < timeout => std::thread::sleep(REMOVE_RETRY_INTERVAL),
                removed => return removed,
            }
        }
    }

    /// Opens its directory.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(CWD, &self.0, flags, Mode::empty())?)
    }

    fn read(&self, file: &str) -> io::Result<String> {
        std::fs::read_to_string(self.0.join(file))
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        // Does not create the file: a missing file means a missing controller.
        let mut file: File = OpenOptions::new().write(true).open(self.0.join(file))?;
        file.write_all(text.as_bytes())
    }
}

/// OOM kills of the nearest cgroup with the memory controller, our own or an ancestor: for processes whose limits are set by
/// another program, such as Slurm.
pub fn nearest_oom_kills() -> Option<u64> {
    let own = Cgroup::own()?;
    own.path()
        .ancestors()
        .find_map(|dir| Cgroup::at(dir).oom_kills())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses plain directories and files; tests/qemu covers the real kernel.
    #[test]
    fn cgroup_files_are_read_and_written() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = Cgroup::at(dir.path()).child("pod");
        cgroup.create().unwrap();
        cgroup.create().unwrap();
        let write =
            |file: &str, text: &str| std::fs::write(cgroup.path().join(file), text).unwrap();
        write("cgroup.controllers", "cpu memory pids\n");
        write("cgroup.procs", "12\n0\n");
        write(
            "memory.events",
            "low 0\noom 3\noom_kill 2\noom_group_kill 1\n",
        );
        write("memory.max", "");
        write("pids.max", "max\n");
        std::fs::write(dir.path().join("pids.max"), "300\n").unwrap();
        assert_eq!(cgroup.controllers(), ["cpu", "memory", "pids"]);
        assert_eq!(cgroup.processes().unwrap(), [12, 0]);
        assert_eq!(cgroup.oom_kills(), Some(2));
        assert_eq!(cgroup.pids_max(), Some(300));
        let limits = CgroupLimits {
            memory: Some(1 << 20),
            processes: Some(9),
            ..CgroupLimits::default()
        };
        cgroup.set_limits(&limits).unwrap();
        let text = |file: &str| std::fs::read_to_string(cgroup.path().join(file)).ok();
        assert_eq!(text("memory.max").as_deref(), Some("1048576"));
        assert_eq!(text("cpu.max"), None, "the cpu controller is not enabled");
    }

    #[test]
    fn removing_a_missing_cgroup_succeeds() {
        Cgroup::at("/nowhere/at/all").remove().unwrap();
    }
}
