//! Control groups of version 2, as far as an ordinary user has been given a part of their tree.
//!
//! A [`Group`] is a directory of the kernel's; what is done to it is done by writing to files there. Whoever wants to limit
//! processes of their own first needs a group that is theirs to divide ([`divide`]), then makes groups below it, sets [`Limits`],
//! has processes born into them ([`crate::fresh::fork_into_group`]), reads [`Usage`], and removes them.
//!
//! Start reading at [`Group`] and [`divide`].

mod divide;
mod limits;
mod place;
mod usage;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use divide::{DivideError, Division, divide};
pub use limits::{Limits, weight_of_shares};
pub use usage::{Io, Throttling, Usage};

use rustix::fs::{Access, CWD, Mode, OFlags};

/// Killed processes leave their group when the kernel has taken them apart, which takes it a moment.
const REMOVE_EVERY: Duration = Duration::from_millis(10);

/// A control group, by its directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group(PathBuf);

impl Group {
    /// The group that this process is in; `None` where none of version 2 can be seen.
    pub fn own() -> Option<Self> {
        let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        place::candidates(&membership, &mounts)
            .into_iter()
            .find(|path| path.join("cgroup.procs").exists())
            .map(Self)
    }

    /// The group with this directory.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A group below it, which may not be there.
    pub fn below(&self, name: &str) -> Self {
        Self(self.0.join(name))
    }

    /// Makes this group, if it isn't there.
    pub fn make(&self) -> io::Result<()> {
        match std::fs::create_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    /// Whether we may make groups below it, hand controllers on to them, and move our processes between them.
    pub fn is_ours(&self) -> bool {
        let may_write = |path: &Path| rustix::fs::access(path, Access::WRITE_OK).is_ok();
        may_write(&self.0)
            && ["cgroup.procs", "cgroup.subtree_control"]
                .iter()
                .all(|file| may_write(&self.0.join(file)))
    }

    /// The controllers that it may hand on.
    pub fn controllers(&self) -> Vec<String> {
        let text = self.read("cgroup.controllers").unwrap_or_default();
        text.split_whitespace().map(str::to_owned).collect()
    }

    /// The processes in it, but not those in groups below; one that our own process namespace doesn't show is 0.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let text = self.read("cgroup.procs")?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// The groups below it.
    pub fn groups(&self) -> Vec<Self> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| Self(entry.path()))
            .collect()
    }

    /// Moves the calling process, with all of its threads, into it.
    pub fn enter(&self) -> io::Result<()> {
        self.write("cgroup.procs", "0")
    }

    /// Has groups below it limited by these controllers. The kernel refuses that while there are processes in it.
    pub fn hand_on(&self, controllers: &[String]) -> io::Result<()> {
        self.control(controllers, '+')
    }

    /// The opposite, after which processes may be in it again.
    pub fn take_back(&self, controllers: &[String]) -> io::Result<()> {
        self.control(controllers, '-')
    }

    fn control(&self, controllers: &[String], sign: char) -> io::Result<()> {
        let words: Vec<String> = controllers.iter().map(|c| format!("{sign}{c}")).collect();
        self.write("cgroup.subtree_control", &words.join(" "))
    }

    /// Sets what its processes may use together. Limits of controllers that were not handed on to it are left out.
    pub fn limit(&self, limits: &Limits) -> io::Result<()> {
        for (file, value) in limits.settings() {
            match self.write(file, &value) {
                // The controller isn't there, or the kernel is older than the file.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                written => written?,
            }
        }
        Ok(())
    }

    /// How often the kernel killed a process of it, or of a group below it, for want of memory. `None` where memory isn't counted.
    pub fn oom_kills(&self) -> Option<u64> {
        usage::field(&self.read("memory.events").ok()?, "oom_kill")
    }

    /// What its processes use, and have used.
    pub fn usage(&self) -> io::Result<Usage> {
        Usage::read(self)
    }

    /// The largest number of processes that it may have, by its own limit or by that of a group above it.
    pub fn most_processes(&self) -> Option<u64> {
        let limit = |dir: &Path| -> Option<u64> {
            let text = std::fs::read_to_string(dir.join("pids.max")).ok()?;
            text.trim().parse().ok()
        };
        self.0.ancestors().filter_map(limit).min()
    }

    /// Kills everything in it and below it, where the kernel can do that at once (5.14).
    pub fn kill(&self) {
        let _ = self.write("cgroup.kill", "1");
    }

    /// Removes it and the groups below it. Fails while there is a process in one of them.
    pub fn remove(&self) -> io::Result<()> {
        for group in self.groups() {
            group.remove()?;
        }
        match std::fs::remove_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// The same, again and again while killed processes are still on their way out. Blocks.
    pub fn remove_within(&self, patience: Duration) -> io::Result<()> {
        let began = Instant::now();
        loop {
            match self.remove() {
                Err(_) if began.elapsed() < patience => std::thread::sleep(REMOVE_EVERY),
                removed => return removed,
            }
        }
    }

    /// Its directory, open.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(CWD, &self.0, flags, Mode::empty())?)
    }

    fn read(&self, file: &str) -> io::Result<String> {
        std::fs::read_to_string(self.0.join(file))
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        // Never made: a file that isn't there is a controller that isn't.
        let mut file: File = OpenOptions::new().write(true).open(self.0.join(file))?;
        file.write_all(text.as_bytes())
    }
}

/// The nearest group of version 2, ours or one above it, that counts memory: for processes that others have limited.
pub fn nearest_oom_kills() -> Option<u64> {
    let own = Group::own()?;
    own.path()
        .ancestors()
        .find_map(|dir| Group::at(dir).oom_kills())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Directories and files that look like groups; what the kernel makes of them is tried in tests/qemu.
    #[test]
    fn files_of_groups_are_read_and_written() {
        let dir = tempfile::tempdir().unwrap();
        let group = Group::at(dir.path()).below("pod");
        group.make().unwrap();
        group.make().unwrap();
        let put = |file: &str, text: &str| std::fs::write(group.path().join(file), text).unwrap();
        put("cgroup.controllers", "cpu memory pids\n");
        put("cgroup.procs", "12\n0\n");
        put(
            "memory.events",
            "low 0\noom 3\noom_kill 2\noom_group_kill 1\n",
        );
        put("memory.max", "");
        put("pids.max", "max\n");
        std::fs::write(dir.path().join("pids.max"), "300\n").unwrap();
        assert_eq!(group.controllers(), ["cpu", "memory", "pids"]);
        assert_eq!(group.processes().unwrap(), [12, 0]);
        assert_eq!(group.oom_kills(), Some(2));
        assert_eq!(group.most_processes(), Some(300));
        let limits = Limits {
            memory: Some(1 << 20),
            processes: Some(9),
            ..Limits::default()
        };
        group.limit(&limits).unwrap();
        let text = |file: &str| std::fs::read_to_string(group.path().join(file)).ok();
        assert_eq!(text("memory.max").as_deref(), Some("1048576"));
        assert_eq!(text("cpu.max"), None, "there is no such controller");
    }

    #[test]
    fn what_is_not_there_is_removed_already() {
        Group::at("/nowhere/at/all").remove().unwrap();
    }
}
