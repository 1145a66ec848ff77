//! Removes the processes and files that a container leaves when its first process has exited.

use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::container_processes::ContainerProcesses;

const KILL_INTERVAL: Duration = Duration::from_millis(5);
/// A process that survives SIGKILL for longer is blocked on a disk or file server. The container is reported as exited all the
/// same.
const MAX_KILLS: u32 = 400;

/// Kills all processes of a container that shares its pid namespace: they do not die with the container's first process.
pub async fn kill_processes(processes: ContainerProcesses) {
    // Scanning all processes of the machine blocks for a while, and the sandbox has one thread.
    let killed = tokio::task::spawn_blocking(move || {
        for _ in 0..MAX_KILLS {
            if processes.kill()? == 0 {
                return Ok(());
            }
            std::thread::sleep(KILL_INTERVAL);
        }
        Err(std::io::Error::other("some processes survive SIGKILL"))
    });
    if let Ok(Err(error)) = killed.await {
        tracing::warn!(%error, "cannot kill all processes of a container");
    }
}

/// Removes files that containers have written. There may be many.
pub async fn remove_dir(dir: PathBuf) {
    let path = dir.clone();
    let removing = tokio::task::spawn_blocking(move || linux::remove::tree(&path));
    if let Ok(Err(error)) = removing.await {
        tracing::warn!(path = %dir.display(), %error, "cannot remove files of a container");
    }
}

/// Removes the files of a container's earlier attempts that were not removed when they ended. A container that keeps crashing
/// would fill the disk.
pub async fn remove_earlier_attempts(dir: &Path, attempt: u32) {
    let attempts = dir.parent().and_then(|dir| std::fs::read_dir(dir).ok());
    let earlier = attempts.into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.parse::<u32>().ok());
        number.is_some_and(|number| number < attempt)
    });
    for entry in earlier {
        remove_dir(entry.path()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn earlier_attempts_are_removed() {
        let home = tempfile::tempdir().unwrap();
        for attempt in ["0/upper/etc", "1/upper", "2", "3"] {
            std::fs::create_dir_all(home.path().join(attempt)).unwrap();
        }
        remove_earlier_attempts(&home.path().join("2"), 2).await;
        let mut left: Vec<_> = std::fs::read_dir(home.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["2", "3"]);
        remove_dir(home.path().join("none")).await;
    }
}
