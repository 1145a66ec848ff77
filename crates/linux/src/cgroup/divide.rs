//! Divides the cgroup of this process, if it is delegated to us.
//!
//! The kernel enables controllers for child cgroups only while the parent contains no processes. So the process that divides its
//! cgroup first moves to a child cgroup:
//!
//! ```text
//!   task_0/                 the delegated cgroup, empty from now on
//!   ├ coracle-node/         `ours`: this process and its descendants
//!   └ coracle-pods/         `theirs`: cgroups that are created later, each with its limits
//! ```

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Group;

/// The controllers to enable. `io` is used for accounting, not for limits.
const WANTED: [&str; 4] = ["cpu", "io", "memory", "pids"];
/// The time-out for killed processes to exit.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why the cgroup cannot be divided.
#[derive(Debug, thiserror::Error)]
pub enum DivideError {
    /// The host has version 1, or no cgroup is visible.
    #[error("there is no control group of version 2 here")]
    None,
    /// It is not delegated to us.
    #[error("the control group {} is not ours to divide", .0.display())]
    NotOurs(PathBuf),
    /// Neither the cpu nor the memory controller is available.
    #[error("the control group {} can hand on neither cpu nor memory", .0.display())]
    NoControllers(PathBuf),
    /// We do not move the processes of other programs.
    #[error("other processes are in the control group {} too", .0.display())]
    Shared(PathBuf),
    /// The kernel reports an error.
    #[error("cannot divide the control group {}", path.display())]
    Refused {
        /// The cgroup.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// A divided cgroup.
#[derive(Clone, Debug)]
pub struct Division {
    whole: Group,
    ours: Group,
    theirs: Group,
    controllers: Vec<String>,
}

/// Divides the cgroup of this process, which must contain no other process. Moves this process to a child cgroup called `ours`, and
/// creates another one called `theirs`.
pub fn divide(ours: &str, theirs: &str) -> Result<Division, DivideError> {
    let whole = Group::own().ok_or(DivideError::None)?;
    let path = whole.path().to_owned();
    let refused = |source| DivideError::Refused {
        path: path.clone(),
        source,
    };
    if !whole.is_ours() {
        return Err(DivideError::NotOurs(path));
    }
    let mut controllers = whole.controllers();
    controllers.retain(|name| WANTED.contains(&name.as_str()));
    if !controllers
        .iter()
        .any(|name| name == "cpu" || name == "memory")
    {
        return Err(DivideError::NoControllers(path));
    }
    if whole.processes().map_err(refused)? != [std::process::id()] {
        return Err(DivideError::Shared(path));
    }
    let division = Division {
        ours: whole.below(ours),
        theirs: whole.below(theirs),
        whole,
        controllers,
    };
    let made = division.make();
    if made.is_err() {
        division.end();
    }
    made.map_err(refused)?;
    Ok(division)
}

impl Division {
    fn make(&self) -> io::Result<()> {
        self.ours.make()?;
        self.theirs.make()?;
        self.ours.enter()?;
        self.whole.hand_on(&self.controllers)?;
        self.theirs.hand_on(&self.controllers)
    }

    /// The parent of the cgroups to create.
    pub fn theirs(&self) -> &Group {
        &self.theirs
    }

    /// The controllers that are enabled for these cgroups.
    pub fn controllers(&self) -> &[String] {
        &self.controllers
    }

    /// Kills the processes in `theirs`, moves this process back, and removes both child cgroups, so that the delegated cgroup is
    /// as before. Errors are ignored: its owner, such as Slurm, removes the rest.
    pub fn end(&self) {
        self.theirs.kill();
        let _ = self.theirs.remove_within(PATIENCE);
        let _ = self.whole.take_back(&self.controllers);
        let _ = self.whole.enter();
        let _ = self.ours.remove_within(PATIENCE);
    }
}
