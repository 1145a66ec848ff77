//! `coracle internal receive DIR`: unpacks on a leader's node what comes on standard input.
//!
//! The directory appears under its name only when it is complete. If that never happens (the stream
//! breaks off, the disk is full, Slurm ends the step), nothing stays.

use std::fs::DirBuilder;
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

use super::{COMPLETE, PROGRAM};
use crate::guard::{self, Over, Policy, Side};

/// The role's entry.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    let (unfinished, program) = (super::beside(dir, ".part"), super::first_path(dir));
    // The guard outlives whatever ends the work.
    match guard::split(Policy::End)? {
        Side::Worker => {
            let received = receive(dir, &unfinished, &program);
            received
                .with_context(|| format!("cannot write to {}", unfinished.display()))
                .map(|()| ExitCode::SUCCESS)
        }
        Side::Guard(Over { code, .. }) => {
            let _ = std::fs::remove_dir_all(&unfinished);
            let _ = std::fs::remove_file(&program);
            Ok(code)
        }
    }
}

fn receive(dir: &Path, unfinished: &Path, program: &Path) -> io::Result<()> {
    // Fails if somebody else has made it; nobody else can see into ours.
    DirBuilder::new().mode(0o700).create(unfinished)?;
    unpack(io::stdin().lock(), unfinished)?;
    // The program that we run from: the leader will do so too.
    std::fs::rename(program, unfinished.join(PROGRAM))?;
    std::fs::rename(unfinished, dir)
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
