//! `coracle internal receive DIR`: unpacks on a leader's node what comes on standard input.
//!
//! Our program gets its name there when everything is complete: that is what the leader's task waits for. If that never
//! happens (the stream breaks off, the disk is full, Slurm ends the step), nothing stays.

use std::io::{self, Read};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

use super::{COMPLETE, PROGRAM, UNFINISHED};
use crate::guard::{self, Over, Policy, Side};

/// The role's entry.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    // The guard outlives whatever ends the work.
    match guard::split(Policy::End)? {
        Side::Worker => receive(dir)
            .with_context(|| format!("cannot write to {}", dir.display()))
            .map(|()| ExitCode::SUCCESS),
        Side::Guard(Over { code, .. }) => {
            if !dir.join(PROGRAM).exists() {
                let _ = std::fs::remove_dir_all(dir);
            }
            Ok(code)
        }
    }
}

fn receive(dir: &Path) -> io::Result<()> {
    unpack(io::stdin().lock(), dir)?;
    // The program that we run from: the leader will do so too.
    std::fs::rename(dir.join(UNFINISHED), dir.join(PROGRAM))
}

/// Unpacks a bundle into the directory `to`; an error if it is not complete.
pub fn unpack(from: impl Read, to: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(from);
    archive.set_preserve_permissions(true);
    archive.unpack(to)?;
    std::fs::remove_file(to.join(COMPLETE)).map_err(|_| {
        io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "what the submitting host sends broke off",
        )
    })
}
