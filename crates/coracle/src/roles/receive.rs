//! `coracle internal receive DIR`, called in DIR: unpacks the bundle on standard input on a leader's node. If the stream is
//! truncated, the disk is full or Slurm ends the step, it removes the directory.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use cluster::carry::bundle;

use crate::guard::{self, Over, Policy, Side};

/// Entry point of the role.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    // The guard removes an incomplete directory, however the worker exits.
    match guard::split(Policy::End)? {
        Side::Worker => bundle::receive(std::io::stdin().lock())
            .with_context(|| format!("cannot write to {}", dir.display()))
            .map(|()| ExitCode::SUCCESS),
        Side::Guard(Over { code, .. }) => {
            bundle::remove_incomplete(dir);
            Ok(code)
        }
    }
}
