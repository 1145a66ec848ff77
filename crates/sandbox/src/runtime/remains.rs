//! What a container leaves behind when its first process has ended: other processes, and files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::kin::Kin;

/// Between looks at what is left.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A process that doesn't even end when it is killed waits for a disk or a server; the container is over all the same.
const LOOK_AT_MOST: u32 = 400;

/// Kills every process of a container, until there is none: those that share a process namespace with others don't end with
/// the container's first.
pub async fn end(kin: Kin) {
    // Looking at all processes of a machine takes a while, and this thread is the pod's only one.
    let ended = tokio::task::spawn_blocking(move || {
        for _ in 0..LOOK_AT_MOST {
            if kin.kill()? == 0 {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Err(std::io::Error::other("some don't end"))
    });
    if let Ok(Err(error)) = ended.await {
        tracing::warn!(%error, "cannot end all processes of a container");
    }
}

/// Removes what containers have written, which may be much: nobody will look into it any more.
pub async fn remove(dir: PathBuf) {
    let path = dir.clone();
    let removing = tokio::task::spawn_blocking(move || linux::remove::tree(&path));
    if let Ok(Err(error)) = removing.await {
        tracing::warn!(path = %dir.display(), %error, "cannot remove what a container wrote");
    }
}

/// Removes what the runs of a container before this one have written, if that wasn't done when they ended. A container that
/// crashes for ever would fill the disk.
pub async fn remove_earlier(dir: &Path, attempt: u32) {
    let runs = dir.parent().and_then(|runs| std::fs::read_dir(runs).ok());
    let earlier = runs.into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u32>().ok());
        number.is_some_and(|number| number < attempt)
    });
    for entry in earlier {
        remove(entry.path()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_newest_run_keeps_its_files() {
        let home = tempfile::tempdir().unwrap();
        for run in ["0/upper/etc", "1/upper", "2", "3"] {
            std::fs::create_dir_all(home.path().join(run)).unwrap();
        }
        remove_earlier(&home.path().join("2"), 2).await;
        let mut left: Vec<_> = std::fs::read_dir(home.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["2", "3"]);
        remove(home.path().join("none")).await;
    }
}
