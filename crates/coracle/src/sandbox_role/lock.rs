//! A pod has one sandbox, whatever its kubelets believe: each holds a lock in the pod's directory for as long as it lives, and
//! dials nobody without it.
//!
//! It is a record lock of POSIX, because of those the kernel tells who holds them: so a kubelet finds a sandbox that an earlier one
//! has started, before that dials, and the guard that ends the node finds all that are left, also where `/proc` does not show them (`hidepid`).
//! The guard of a node's agent holds one in the node's directory too, so that a node has one agent.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Flock, FlockType, fcntl_getlk};

/// The file, in the directory of the pod or of the node.
const NAME: &str = "lock";
/// How long a sandbox that was killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Takes the lock of the pod whose directory `dir` is, which lasts until what is returned is dropped.
pub fn take(dir: &Path) -> io::Result<File> {
    take_within(dir, PATIENCE)
}

fn take_within(dir: &Path, patience: Duration) -> io::Result<File> {
    let taken = try_take(dir, patience)?;
    taken.ok_or_else(|| io::Error::other("the pod has another sandbox, which goes on"))
}

/// Takes the lock in `dir`; `None` if another process still holds it after `patience`.
pub fn try_take(dir: &Path, patience: Duration) -> io::Result<Option<File>> {
    let end = Instant::now() + patience;
    loop {
        let file = open(dir)?;
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_file_of(&file, dir) => return Ok(Some(file)),
            // The file was removed or replaced before it was locked, so that no other process would find the lock.
            Ok(()) => {}
            Err(Errno::ACCESS | Errno::AGAIN) if Instant::now() < end => std::thread::sleep(PAUSE),
            Err(Errno::ACCESS | Errno::AGAIN) => return Ok(None),
            // Better than no pods at all: two of one pod are rare.
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "pods can't be locked here");
                return Ok(Some(file));
            }
        }
    }
}

fn open(dir: &Path) -> io::Result<File> {
    std::fs::create_dir_all(dir)?;
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.open(dir.join(NAME))
}

/// Whether the file that was opened is the one in `dir`. (To open that one as well, and close it, would release the lock.)
fn is_file_of(file: &File, dir: &Path) -> bool {
    let identity = |found: std::fs::Metadata| (found.dev(), found.ino());
    let found = std::fs::symlink_metadata(dir.join(NAME)).map(identity);
    let opened = file.metadata().map(identity);
    opened.is_ok_and(|opened| found.is_ok_and(|found| found == opened))
}

/// Kills the process that holds the lock, if it isn't this one. Says whether there was one.
pub fn kill_holder(dir: &Path) -> bool {
    // Its number can't become another's while it still holds the lock.
    holder(dir).is_some_and(|pid| linux::process::kill_if(pid, || holder(dir) == Some(pid)))
}

/// The process that holds the lock, if it isn't this one.
pub fn holder(dir: &Path) -> Option<i32> {
    let file = File::open(dir.join(NAME)).ok()?;
    let lock = fcntl_getlk(&file, &Flock::from(FlockType::WriteLock)).ok()??;
    lock.pid.map(|pid| pid.as_raw_nonzero().get())
}

/// Whether another process than this one holds the lock. If the check fails, assume that one does.
///
/// Never call this, or [`holder`], in the process that holds the lock: closing any descriptor of the file releases it.
pub fn is_held(dir: &Path) -> bool {
    let file = match File::open(dir.join(NAME)) {
        Ok(file) => file,
        Err(error) => {
            let kinds = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
            return !kinds.contains(&error.kind());
        }
    };
    // Where there are no locks, nobody holds one.
    fcntl_getlk(&file, &Flock::from(FlockType::WriteLock)).is_ok_and(|lock| lock.is_some())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// For the process below: the directory to lock.
    const DIR: &str = "CORACLE_TEST_LOCK";

    #[test]
    fn a_pod_has_one_sandbox_and_it_is_known_which() {
        if let Some(dir) = std::env::var_os(DIR) {
            return hold(Path::new(&dir));
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        assert_eq!(holder(&dir), None);
        let mut other = holding("a_pod_has_one_sandbox_and_it_is_known_which", &dir);
        assert_eq!(holder(&dir), i32::try_from(other.id()).ok());
        assert!(is_held(&dir));
        let refused = take_within(&dir, Duration::ZERO).unwrap_err();
        assert!(refused.to_string().contains("another sandbox"), "{refused}");

        other.stdin.take().unwrap().write_all(b"\n").unwrap();
        let _lock = take(&dir).unwrap();
        assert!(other.wait().unwrap().success());
        assert_eq!(holder(&dir), None);
        assert!(!is_held(&dir) && !is_held(&home.path().join("no-pod")));
    }

    #[test]
    fn only_the_holder_is_killed() {
        if let Some(dir) = std::env::var_os(DIR) {
            return hold(Path::new(&dir));
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        assert!(!kill_holder(&dir));
        let mut other = holding("only_the_holder_is_killed", &dir);
        assert!(kill_holder(&dir));
        assert_eq!(other.wait().unwrap().signal(), Some(9));
        assert!(!kill_holder(&dir));
        // Nor is it us.
        let _lock = take(&dir).unwrap();
        assert!(!kill_holder(&dir));
    }

    #[test]
    fn a_lock_on_a_file_that_was_replaced_is_taken_again() {
        let home = tempfile::tempdir().unwrap();
        let file = open(home.path()).unwrap();
        assert!(is_file_of(&file, home.path()));
        std::fs::remove_file(home.path().join(NAME)).unwrap();
        assert!(!is_file_of(&file, home.path()));
        let other = open(home.path()).unwrap();
        assert!(!is_file_of(&file, home.path()) && is_file_of(&other, home.path()));
    }

    /// The holder of the lock removes its file while another process waits for it.
    #[test]
    fn who_waits_for_a_lock_does_not_get_that_of_a_removed_file() {
        if let Some(dir) = std::env::var_os(DIR) {
            return hold(Path::new(&dir));
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        let mut other = holding(
            "who_waits_for_a_lock_does_not_get_that_of_a_removed_file",
            &dir,
        );
        let waiting = {
            let dir = dir.clone();
            std::thread::spawn(move || take(&dir).unwrap())
        };
        std::thread::sleep(4 * PAUSE);
        std::fs::remove_dir_all(&dir).unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        let lock = waiting.join().unwrap();
        assert!(is_file_of(&lock, &dir));
    }

    /// Holds the lock until standard input ends.
    fn hold(dir: &Path) {
        let _lock = take(dir).unwrap();
        eprint!("taken");
        let _ = std::io::stdin().read(&mut [0]);
    }

    /// Another process, which runs the named test of this module and holds the lock.
    fn holding(test: &str, dir: &Path) -> Child {
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg(format!("sandbox_role::lock::tests::{test}"))
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0; 5];
        let mut stderr = other.stderr.take().unwrap();
        stderr.read_exact(&mut said).unwrap();
        other
    }
}
