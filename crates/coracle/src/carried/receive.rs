//! `coracle internal receive DIR`: unpacks on a leader's node what comes on standard input.
//!
//! The directory appears under its name only when it is complete. If that never happens (the stream
//! breaks off, the disk is full, Slurm ends the step), nothing stays.

use std::fs::DirBuilder;
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;

use super::{COMPLETE, PROGRAM};
use crate::guard::{self, Policy, Side};

/// The role's entry.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    let unfinished = unfinished(dir);
    // By this name for now: Slurm has carried the program that we run from.
    let program = std::env::current_exe().context("cannot find our own program")?;
    // The guard outlives whatever ends the work.
    match guard::split(Policy::End)? {
        Side::Worker => {
            let received = receive(dir, &unfinished, &program);
            received
                .with_context(|| format!("cannot write to {}", unfinished.display()))
                .map(|()| ExitCode::SUCCESS)
        }
        Side::Guard(code) => {
            let _ = std::fs::remove_dir_all(&unfinished);
            if super::is_copys_name(&program) {
                let _ = std::fs::remove_file(&program);
            }
            Ok(code)
        }
    }
}

/// Where it is until it is complete.
fn unfinished(dir: &Path) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn receive(dir: &Path, unfinished: &Path, program: &Path) -> io::Result<()> {
    // Fails if somebody else has made it; nobody else can see into ours.
    DirBuilder::new().mode(0o700).create(unfinished)?;
    unpack(io::stdin().lock(), unfinished)?;
    // The leader will run from it too.
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
