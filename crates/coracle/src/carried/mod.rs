//! What was carried to a node that doesn't see the original, and how it goes away again.
//!
//! An agent, the doctor and `coracle logs` need our program alone: the shell of a step receives it ([`script`]) as a
//! stream ([`program`]). A leader needs more where there is no shared file system: the release of Kubernetes and the
//! workload, which `coracle run` sends after the program ([`bundle`] writes them, [`receive`] unpacks them). Either way
//! there is a directory in `/tmp`, of this user alone, whose name the node itself has made.

pub mod bundle;
pub mod program;
pub mod receive;
pub mod script;

use std::path::{Path, PathBuf};

/// What every directory's name begins with, and how many letters and digits of `mktemp` follow.
const PREFIX: &str = "coracle-carried.";
const RANDOM: usize = 16;
/// Our program in it, and before everything else is there.
const PROGRAM: &str = "coracle";
const UNFINISHED: &str = "coracle.part";
/// The releases of Kubernetes in it.
const RELEASES: &str = "kubernetes";
/// The workload in it, under its own name.
const WORKLOAD: &str = "workload";
/// The last entry of a bundle: without it, the rest is not complete.
const COMPLETE: &str = "complete";

/// The directory that a node says it has made.
pub fn parse_dir(text: &str) -> Option<PathBuf> {
    let dir = Path::new(text);
    (dir.parent() == Some(Path::new("/tmp")) && is_copys_name(dir)).then(|| dir.to_owned())
}

/// Whether this process runs from a copy, which other nodes don't see.
pub fn is_ours() -> bool {
    our_directory().is_some()
}

/// Removes the copy that this process runs from, if it is one, with all that came with it; we go on
/// without it.
pub fn remove() {
    if let Some(dir) = our_directory() {
        let _ = std::fs::remove_dir_all(dir);
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

fn our_directory() -> Option<PathBuf> {
    copy_of(&std::env::current_exe().ok()?)
}

/// The directory that a program was carried to, also when it is deleted already.
fn copy_of(program: &Path) -> Option<PathBuf> {
    let text = program.to_str()?;
    let program = Path::new(text.strip_suffix(" (deleted)").unwrap_or(text));
    let dir = program.parent()?;
    (program.file_name()? == PROGRAM && is_copys_name(dir)).then(|| dir.to_owned())
}

fn is_copys_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let random = name.and_then(|name| name.strip_prefix(PREFIX));
    random.is_some_and(|r| r.len() == RANDOM && r.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_copies_are_removed() {
        let dir = Path::new("/tmp/coracle-carried.0123456789abcDEF");
        for program in ["coracle", "coracle (deleted)"] {
            assert_eq!(copy_of(&dir.join(program)).as_deref(), Some(dir));
        }
        for other in [
            "/usr/bin/coracle",
            "/tmp/coracle-carried.0123456789abcDEF",
            "/tmp/coracle-carried.0123456789abcDEF/other",
            "/tmp/coracle-carried.0123456789abcDE/coracle",
            "/tmp/coracle-carried./coracle",
            "/tmp/coracle-test/coracle",
        ] {
            assert_eq!(copy_of(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn only_directories_in_tmp_are_filled() {
        let parsed = |text| parse_dir(text).is_some();
        assert!(parsed("/tmp/coracle-carried.0123456789abcDEF"));
        for other in [
            "",
            "-",
            "/tmp",
            "/home/u/coracle-carried.0123456789abcDEF",
            "/tmp/../coracle-carried.0123456789abcDEF",
            "/tmp/coracle-carried.0123456789abcDE/",
            "/tmp/coracle-carried.0123456789abc/EF",
        ] {
            assert!(!parsed(other), "{other}");
        }
    }
}
