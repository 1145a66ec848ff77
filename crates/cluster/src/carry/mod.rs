//! Carrying: copying this program, the release of Kubernetes and the workload to nodes that do not see the originals.
//!
//! An agent, the doctor and `coracle logs` need the program alone: the shell of a step receives it ([`script`]) as a
//! stream ([`program_stream`]). Without a shared file system a leader also needs the release and the
//! workload, which `coracle run` sends after the program ([`archive`] writes and unpacks them). Either way
//! the copy lies in a directory in `/tmp` that only this user can enter and that the node itself has named.

pub mod archive;
pub mod program_stream;
pub mod script;

use std::path::{Path, PathBuf};

/// Prefix of a carry directory's name, and the number of random characters that `mktemp` adds.
const CARRY_DIR_PREFIX: &str = "coracle-carried.";
const RANDOM_CHARS: usize = 16;
/// The program in the directory: its name, and the name until the copy is complete.
const PROGRAM: &str = "coracle";
const UNFINISHED: &str = "coracle.part";
/// The releases of Kubernetes in the directory.
const RELEASES: &str = "kubernetes";
/// The directory that contains the workload.
const WORKLOAD: &str = "workload";
/// The last entry of an archive: without it, the archive is incomplete.
const COMPLETE: &str = "complete";

/// Parses the carry directory that a node reports; `None` if it is not one in `/tmp`.
pub fn parse_dir(text: &str) -> Option<PathBuf> {
    let dir = Path::new(text);
    (dir.parent() == Some(Path::new("/tmp")) && is_carry_dir_name(dir)).then(|| dir.to_owned())
}

/// Whether this process runs from a carried copy, which other nodes do not see.
pub fn is_carried() -> bool {
    own_dir().is_some()
}

/// Removes the directory of the carried copy that this process runs from, if it is one.
pub fn remove() {
    if let Some(dir) = own_dir() {
        let _ = std::fs::remove_dir_all(dir);
    }
}

/// The directory of releases that was carried with this program.
pub fn releases() -> Option<PathBuf> {
    Some(own_dir()?.join(RELEASES)).filter(|dir| dir.is_dir())
}

/// The directory with the workload that was carried with this program, and the workload in it.
pub fn workload() -> Option<(PathBuf, PathBuf)> {
    let dir = own_dir()?.join(WORKLOAD);
    let entry = std::fs::read_dir(&dir).ok()?.next()?.ok()?;
    Some((dir, entry.path()))
}

fn own_dir() -> Option<PathBuf> {
    carried_dir(&std::env::current_exe().ok()?)
}

/// The directory of a carried program, even if it is deleted already.
fn carried_dir(program: &Path) -> Option<PathBuf> {
    let text = program.to_str()?;
    let program = Path::new(text.strip_suffix(" (deleted)").unwrap_or(text));
    let dir = program.parent()?;
    (program.file_name()? == PROGRAM && is_carry_dir_name(dir)).then(|| dir.to_owned())
}

fn is_carry_dir_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let suffix = name.and_then(|name| name.strip_prefix(CARRY_DIR_PREFIX));
    suffix.is_some_and(|suffix| {
        suffix.len() == RANDOM_CHARS && suffix.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_carried_copies_are_removed() {
        let dir = Path::new("/tmp/coracle-carried.0123456789abcDEF");
        for program in ["coracle", "coracle (deleted)"] {
            assert_eq!(carried_dir(&dir.join(program)).as_deref(), Some(dir));
        }
        for other in [
            "/usr/bin/coracle",
            "/tmp/coracle-carried.0123456789abcDEF",
            "/tmp/coracle-carried.0123456789abcDEF/other",
            "/tmp/coracle-carried.0123456789abcDE/coracle",
            "/tmp/coracle-carried./coracle",
            "/tmp/coracle-test/coracle",
        ] {
            assert_eq!(carried_dir(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn accepts_only_own_directories_in_tmp() {
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
