//! `coracle internal receive DIR`, called in DIR: unpacks the archive on standard input on a leader's node. If the stream is
//! truncated, the disk is full or Slurm ends the step, it removes the directory.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use cluster::carry::archive;

use crate::guard::{self, GuardPolicy, GuardResult, GuardedProcess};

/// Entry point of the role.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    // The guard removes an incomplete directory, however the worker exits.
    match guard::fork_worker(GuardPolicy::Exit)? {
        GuardedProcess::Worker => archive::receive(std::io::stdin().lock())
            .with_context(|| format!("cannot write to {}", dir.display()))
            .map(|()| ExitCode::SUCCESS),
        GuardedProcess::Guard(GuardResult { code, .. }) => {
            archive::remove_incomplete(dir);
            Ok(code)
        }
    }
}
