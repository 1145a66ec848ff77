//! Our own program where Slurm carried it to a node (`srun --bcast`), because the node doesn't see the
//! original: under which name, and how the copy goes away again. Slurm itself leaves it there.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// What every copy's name begins with; 256 random bits follow, so that nobody can guess it.
const PREFIX: &str = "coracle-";
/// All tasks of a node have been started by then.
const ALL_STARTED: Duration = Duration::from_secs(2);

/// A path for a new copy.
pub fn new_path() -> anyhow::Result<PathBuf> {
    Ok(Path::new("/tmp").join(format!("{PREFIX}{}", crate::token::new()?)))
}

/// Removes the copy that this process runs from, if it is one; we go on without its name.
pub fn remove() {
    if let Some(copy) = our_copy() {
        let _ = std::fs::remove_file(copy);
    }
}

/// The same, when other tasks of this node may still have to start from it.
pub fn remove_when_all_have_started() {
    if our_copy().is_some() {
        std::thread::sleep(ALL_STARTED);
        remove();
    }
}

fn our_copy() -> Option<PathBuf> {
    std::env::current_exe()
        .ok()
        .filter(|program| is_copy(program))
}

fn is_copy(program: &Path) -> bool {
    let name = program
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let random = name.strip_prefix(PREFIX).unwrap_or_default();
    random.len() == 64 && random.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_copies_are_removed() {
        assert!(is_copy(&new_path().unwrap()));
        for other in ["/usr/bin/coracle", "/tmp/coracle-test", "/tmp/coracle-"] {
            assert!(!is_copy(Path::new(other)), "{other}");
        }
    }
}
