//! `coracle internal remove DIR`: removes a directory that containers have written to.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use crate::{cleanup, process_lock};

/// Time that a sandbox has to exit before its pod's directory is removed.
const SANDBOX_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The kind of a directory to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovedDir {
    /// A pod, with its lock. A sandbox may hold the lock even if the kubelet knows of none.
    Pod,
    /// A volume. A file `lock` in it belongs to containers and is not opened.
    Volume,
}

/// Entry point of the role.
pub fn main(dir: &Path, is_pod: bool) -> anyhow::Result<ExitCode> {
    if is_pod {
        remove_pod(dir, SANDBOX_EXIT_TIMEOUT)?;
    } else {
        cleanup::remove_tree(dir)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes a pod's directory, unless a sandbox of the pod still runs after `timeout`.
fn remove_pod(dir: &Path, timeout: Duration) -> io::Result<()> {
    // Held during the removal, so that no sandbox starts in the directory meanwhile. Removal opens no regular file, so it keeps the lock.
    let _lock = lock_pod(dir, timeout)?;
    cleanup::remove_tree(dir)
}

/// Locks a pod. `None` if the directory has no lock file: then no sandbox runs, and on a full disk none could be created.
fn lock_pod(dir: &Path, timeout: Duration) -> io::Result<Option<File>> {
    if !process_lock::exists(dir)? {
        return Ok(None);
    }
    match process_lock::try_acquire(dir, timeout)? {
        Some(lock) => Ok(Some(lock)),
        None => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a sandbox of the pod still runs",
        )),
    }
}

/// Removes a directory in another process: the caller may have several threads.
pub async fn run_process(dir: PathBuf, holds: RemovedDir) -> io::Result<()> {
    let output = tokio::process::Command::new("/proc/self/exe")
        .args(["internal", "remove"])
        .args((holds == RemovedDir::Pod).then_some("--pod"))
        .arg(&dir)
        .stdin(Stdio::null())
        .output()
        .await?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(stderr.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_lock::testing::LockHolder;

    #[test]
    fn directory_of_running_pod_is_not_removed() {
        let test = "roles::remove::tests::directory_of_running_pod_is_not_removed";
        if LockHolder::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pods/uid");
        std::fs::create_dir_all(dir.join("volumes/v")).unwrap();
        let pod = LockHolder::start(test, &dir);
        let error = remove_pod(&dir, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert!(dir.join("volumes/v").exists());

        // The removal waits for a sandbox that exits.
        let waiting = {
            let dir = dir.clone();
            std::thread::spawn(move || remove_pod(&dir, SANDBOX_EXIT_TIMEOUT))
        };
        pod.end();
        waiting.join().unwrap().unwrap();
        assert!(!dir.exists());
    }

    #[test]
    fn directory_without_lock_is_removed() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("uid");
        std::fs::create_dir_all(dir.join("logs")).unwrap();
        assert!(lock_pod(&dir, Duration::ZERO).unwrap().is_none());
        remove_pod(&dir, Duration::ZERO).unwrap();
        remove_pod(&dir, Duration::ZERO).unwrap();
        assert!(!dir.exists());
    }
}
