//! `coracle internal receive DIR`, in DIR: unpacks on a leader's node what comes on standard input.
//!
//! Our program gets its name there when everything is complete: that is what the leader's task waits for. If that never
//! happens (the stream breaks off, the disk is full, Slurm ends the step), nothing stays.
//!
//! The leader's task may remove the directory meanwhile, and its name may then be another user's. So files are made in the
//! working directory, whatever its name is.

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
        Side::Worker => receive()
            .with_context(|| format!("cannot write to {}", dir.display()))
            .map(|()| ExitCode::SUCCESS),
        Side::Guard(Over { code, .. }) => {
            if !Path::new(PROGRAM).exists() {
                remove(dir);
            }
            Ok(code)
        }
    }
}

fn receive() -> io::Result<()> {
    unpack(io::stdin().lock(), Path::new("."))?;
    // The program that we run from: the leader will do so too.
    std::fs::rename(UNFINISHED, PROGRAM)
}

/// Removes the working directory, which is called `dir` unless it is gone already.
fn remove(dir: &Path) {
    // This fails at the directory itself, when it is empty.
    let _ = std::fs::remove_dir_all(".");
    let _ = std::fs::remove_dir(dir);
}

/// Unpacks a bundle into the directory `to`; an error if it is not complete.
pub fn unpack(from: impl Read, to: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(from);
    archive.set_preserve_permissions(true);
    // Not by `Archive::unpack`, which looks up the directory's name. As there, directories come last: they may be read-only.
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_dir() {
            directories.push(entry);
        } else {
            entry.unpack_in(to)?;
        }
    }
    directories.sort_by(|a, b| b.path_bytes().cmp(&a.path_bytes()));
    for mut directory in directories {
        directory.unpack_in(to)?;
    }
    std::fs::remove_file(to.join(COMPLETE)).map_err(|_| {
        io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "what the submitting host sends broke off",
        )
    })
}
