//! What Slurm carried to a node that doesn't see the original, and how it goes away again: Slurm itself
//! leaves it there.
//!
//! There are two forms. An agent, and the doctor, need our program alone: a file, carried by
//! `srun --bcast`. A leader needs more where there is no shared file system: a directory with our
//! program, the release of Kubernetes and the workload, which `coracle run` fills from the submitting host
//! ([`bundle`] writes it, [`receive`] unpacks it). Both have names in `/tmp` that nobody can guess.

pub mod bundle;
pub mod receive;

use std::path::{Path, PathBuf};

/// What every copy's name begins with; 256 random bits follow, so that nobody can guess it.
const PREFIX: &str = "coracle-";
/// Our program in a directory.
const PROGRAM: &str = "coracle";
/// The releases of Kubernetes in it.
const RELEASES: &str = "kubernetes";
/// The workload in it, under its own name.
const WORKLOAD: &str = "workload";
/// The last entry of a bundle: without it, the rest is not complete.
const COMPLETE: &str = "complete";

/// A path for a new copy, a file or a directory.
pub fn new_path() -> anyhow::Result<PathBuf> {
    Ok(Path::new("/tmp").join(format!("{PREFIX}{}", crate::token::new()?)))
}

/// Where Slurm puts our program first, for a new directory: beside it.
pub fn first_path(dir: &Path) -> PathBuf {
    beside(dir, ".first")
}

/// Our program in a directory that is complete.
pub fn program(dir: &Path) -> PathBuf {
    dir.join(PROGRAM)
}

fn beside(dir: &Path, suffix: &str) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whether this process runs from a copy, which other nodes don't see.
pub fn is_ours() -> bool {
    our_copy().is_some()
}

/// Removes the copy that this process runs from, if it is one, with all that came with it; we go on
/// without it.
pub fn remove() {
    match our_copy() {
        Some(Copy::File(file)) => drop(std::fs::remove_file(file)),
        Some(Copy::Directory(dir)) => drop(std::fs::remove_dir_all(dir)),
        None => {}
    }
}

/// The directory of releases that was carried here with us.
pub fn releases() -> Option<PathBuf> {
    Some(our_directory()?.join(RELEASES)).filter(|dir| dir.is_dir())
}

/// The directory with the workload that was carried here with us, and the workload in it.
pub fn workload() -> Option<(PathBuf, PathBuf)> {
    let dir = our_directory()?.join(WORKLOAD);
    let entry = std::fs::read_dir(&dir).ok()?.next()?.ok()?;
    Some((dir, entry.path()))
}

#[derive(Debug, PartialEq)]
enum Copy {
    File(PathBuf),
    Directory(PathBuf),
}

fn our_directory() -> Option<PathBuf> {
    match our_copy()? {
        Copy::Directory(dir) => Some(dir),
        Copy::File(_) => None,
    }
}

fn our_copy() -> Option<Copy> {
    copy_of(&std::env::current_exe().ok()?)
}

/// The copy that a program belongs to, also when it is deleted already.
fn copy_of(program: &Path) -> Option<Copy> {
    let text = program.to_str()?;
    let program = Path::new(text.strip_suffix(" (deleted)").unwrap_or(text));
    let parent = program.parent()?;
    if is_copys_name(program) {
        Some(Copy::File(program.to_owned()))
    } else if program.file_name()? == PROGRAM && is_copys_name(parent) {
        Some(Copy::Directory(parent.to_owned()))
    } else {
        None
    }
}

fn is_copys_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let random = name.and_then(|name| name.strip_prefix(PREFIX));
    random.is_some_and(|r| r.len() == 64 && r.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_copies_are_removed() {
        let copy = new_path().unwrap();
        assert_eq!(copy_of(&copy), Some(Copy::File(copy.clone())));
        let inside = copy.join(PROGRAM);
        assert_eq!(copy_of(&inside), Some(Copy::Directory(copy.clone())));
        let deleted = format!("{} (deleted)", inside.display());
        assert_eq!(copy_of(Path::new(&deleted)), Some(Copy::Directory(copy)));
        for other in [
            "/usr/bin/coracle",
            "/tmp/coracle-test",
            "/tmp/coracle-",
            "/tmp/coracle-test/coracle",
        ] {
            assert_eq!(copy_of(Path::new(other)), None, "{other}");
        }
    }
}
