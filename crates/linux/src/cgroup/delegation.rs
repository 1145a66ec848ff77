//! Sets up the cgroup of this process, if it is delegated to the user, so that workloads get child cgroups with limits.
//!
//! The kernel enables controllers for child cgroups only while the parent contains no processes. So this process first moves to a
//! child cgroup itself:
//!
//! ```text
//!   task_0/                 the delegated cgroup, empty from now on
//!   ├ coracle-node/         `own`: this process and its descendants
//!   └ coracle-pods/         `workloads`: cgroups that are created later, each with its limits
//! ```

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Cgroup;

/// The controllers to enable. `io` is used for accounting, not for limits.
const CONTROLLERS: [&str; 4] = ["cpu", "io", "memory", "pids"];
/// The time-out for killed processes to exit.
const CGROUP_EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the cgroup of this process cannot be set up for workloads.
#[derive(Debug, thiserror::Error)]
pub enum DelegationError {
    /// The host has version 1, or no cgroup is visible.
    #[error("no cgroup v2 is visible")]
    NoCgroupV2,
    /// The user may not write to it.
    #[error("the cgroup {} is not delegated to this user", .0.display())]
    NotDelegated(PathBuf),
    /// Neither the cpu nor the memory controller is available.
    #[error("neither the cpu nor the memory controller is available in the cgroup {}", .0.display())]
    NoControllers(PathBuf),
    /// Processes of other programs are in it. This process does not move them.
    #[error("the cgroup {} contains other processes", .0.display())]
    NotAlone(PathBuf),
    /// The kernel reports an error.
    #[error("cannot set up child cgroups of {}", path.display())]
    Io {
        /// The cgroup.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// A delegated cgroup with one child for this process and one for workloads.
#[derive(Clone, Debug)]
pub struct DelegatedCgroup {
    parent: Cgroup,
    own: Cgroup,
    workloads: Cgroup,
    controllers: Vec<String>,
}

impl DelegatedCgroup {
    /// Creates child cgroups with these names in the cgroup of this process, which must contain no other process, and moves this
    /// process to the first one.
    pub fn set_up(own: &str, workloads: &str) -> Result<Self, DelegationError> {
        let parent = Cgroup::own().ok_or(DelegationError::NoCgroupV2)?;
        let path = parent.path().to_owned();
        let failed = |source| DelegationError::Io {
            path: path.clone(),
            source,
        };
        if !parent.is_delegated() {
            return Err(DelegationError::NotDelegated(path));
        }
        let mut controllers = parent.controllers();
        controllers.retain(|name| CONTROLLERS.contains(&name.as_str()));
        if !controllers
            .iter()
            .any(|name| name == "cpu" || name == "memory")
        {
            return Err(DelegationError::NoControllers(path));
        }
        if parent.processes().map_err(failed)? != [std::process::id()] {
            return Err(DelegationError::NotAlone(path));
        }
        let delegated = Self {
            own: parent.child(own),
            workloads: parent.child(workloads),
            parent,
            controllers,
        };
        let created = delegated.create_children();
        if created.is_err() {
            delegated.tear_down();
        }
        created.map_err(failed)?;
        Ok(delegated)
    }

    fn create_children(&self) -> io::Result<()> {
        self.own.create()?;
        self.workloads.create()?;
        self.own.enter()?;
        self.parent.enable_controllers(&self.controllers)?;
        self.workloads.enable_controllers(&self.controllers)
    }

    /// The parent of the cgroups of workloads.
    pub fn workloads(&self) -> &Cgroup {
        &self.workloads
    }

    /// The controllers that are enabled for the cgroups of workloads.
    pub fn controllers(&self) -> &[String] {
        &self.controllers
    }

    /// Kills the processes in `workloads`, moves this process back, and removes both child cgroups, so that the delegated cgroup
    /// is as before. Errors are ignored: its owner, such as Slurm, removes the rest.
    pub fn tear_down(&self) {
        self.workloads.kill();
        let _ = self.workloads.remove_with_retries(CGROUP_EXIT_TIMEOUT);
        let _ = self.parent.disable_controllers(&self.controllers);
        let _ = self.parent.enter();
        let _ = self.own.remove_with_retries(CGROUP_EXIT_TIMEOUT);
    }
}
