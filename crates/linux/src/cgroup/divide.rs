//! Dividing the group that this process is in, if it was given to us.
//!
//! The kernel limits groups below one only while that one has no processes itself. So whoever divides a group first moves
//! out of it, into a group of its own:
//!
//! ```text
//!   task_0/                 what we were given, empty from now on
//!   ├ coracle-node/         `ours`: this process and all that it starts
//!   └ coracle-pods/         `theirs`: groups that are made later, each with its limits
//! ```

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Group;

/// The controllers that are wanted; `io` limits nothing of ours, it counts.
const WANTED: [&str; 4] = ["cpu", "io", "memory", "pids"];
/// What killed processes may take to be gone.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why the group can't be divided.
#[derive(Debug, thiserror::Error)]
pub enum DivideError {
    /// The host has version 1, or shows us nothing.
    #[error("there is no control group of version 2 here")]
    None,
    /// It belongs to somebody else.
    #[error("the control group {} is not ours to divide", .0.display())]
    NotOurs(PathBuf),
    /// Nothing to limit with.
    #[error("the control group {} can hand on neither cpu nor memory", .0.display())]
    NoControllers(PathBuf),
    /// Moving other programs' processes around is not our business.
    #[error("other processes are in the control group {} too", .0.display())]
    Shared(PathBuf),
    /// The kernel refuses.
    #[error("cannot divide the control group {}", path.display())]
    Refused {
        /// The group.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A group that was divided.
#[derive(Clone, Debug)]
pub struct Division {
    whole: Group,
    ours: Group,
    theirs: Group,
    controllers: Vec<String>,
}

/// Divides the group that this process is alone in: it moves into one called `ours`, and one called `theirs` is made for others.
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

    /// The group to make others in.
    pub fn theirs(&self) -> &Group {
        &self.theirs
    }

    /// The controllers that limit those.
    pub fn controllers(&self) -> &[String] {
        &self.controllers
    }

    /// Kills what is left in the groups of others, moves this process back, and removes everything: what we were given is
    /// as we found it. What can't be removed stays, for whoever gave it to us.
    pub fn end(&self) {
        self.theirs.kill();
        let _ = self.theirs.remove_within(PATIENCE);
        let _ = self.whole.take_back(&self.controllers);
        let _ = self.whole.enter();
        let _ = self.ours.remove_within(PATIENCE);
    }
}
