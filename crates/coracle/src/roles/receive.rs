//! `coracle internal receive DIR`, called in DIR: unpacks on a leader's node the bundle that arrives on standard input. If the stream
//! breaks off, the disk is full or Slurm ends the step, the directory is removed.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use cluster::carry::bundle;

use crate::guard::{self, Over, Policy, Side};

/// The role's entry.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    // The guard survives the worker, however that ends.
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
