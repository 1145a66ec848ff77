//! A pod has one sandbox, whatever its kubelets believe: each holds a lock in the pod's directory for as long as it lives, and
//! dials nobody without it.
//!
//! It is a record lock of POSIX, because of those the kernel tells who holds them: so a kubelet finds a sandbox that an earlier one
//! has started, before that dials. The guard of a node's agent holds one in the node's directory too, so that a node has one agent.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
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
    std::fs::create_dir_all(dir)?;
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600);
    let file = options.open(dir.join(NAME))?;
    let end = Instant::now() + patience;
    loop {
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
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
    use std::process::{Command, Stdio};

    use super::*;

    /// For the process below: the directory to lock.
    const DIR: &str = "CORACLE_TEST_LOCK";

    #[test]
    fn a_pod_has_one_sandbox_and_it_is_known_which() {
        if let Some(dir) = std::env::var_os(DIR) {
            let _lock = take(Path::new(&dir)).unwrap();
            eprint!("taken");
            let _ = std::io::stdin().read(&mut [0]);
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        assert_eq!(holder(&dir), None);
        let mut other = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("pod_lock::tests::a_pod_has_one_sandbox_and_it_is_known_which")
            .env(DIR, &dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0; 5];
        other.stderr.take().unwrap().read_exact(&mut said).unwrap();
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
}
