//! Locks of the processes that use a node's directory: one guard and one hub per node, one sandbox per pod.
//!
//! Each holds a lock in a directory of its own for as long as it runs, and the kernel releases the lock however the process ends. So
//! the locks tell whether a directory may be removed ([`crate::cleanup`]).
//!
//! These are POSIX record locks, because the kernel reports the process that holds one (`F_GETLK`). So a kubelet finds a sandbox
//! that an earlier kubelet started before the sandbox has connected, and the node's shutdown finds all remaining processes, also
//! where `/proc` does not show them (`hidepid`).

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Flock, FlockType, fcntl_getlk};

/// Name of the lock file in the process's directory.
pub const LOCK_FILE: &str = "lock";
/// Time in which an earlier sandbox of the pod, which was killed, has to exit.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
const ACQUIRE_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Acquires the lock of the pod with the directory `dir`. Dropping the returned file releases it.
pub fn acquire(dir: &Path) -> io::Result<File> {
    acquire_within(dir, ACQUIRE_TIMEOUT)
}

fn acquire_within(dir: &Path, timeout: Duration) -> io::Result<File> {
    let lock = try_acquire(dir, timeout)?;
    lock.ok_or_else(|| io::Error::other("another sandbox of the pod is running"))
}

/// Acquires the lock in `dir`, which is created in an existing directory; `None` if another process still holds it after `timeout`.
pub fn try_acquire(dir: &Path, timeout: Duration) -> io::Result<Option<File>> {
    let end = Instant::now() + timeout;
    loop {
        let file = open(dir)?;
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_file_of(&file, dir) => return Ok(Some(file)),
            // The file was removed or replaced before it was locked, so other processes would not see this lock. Try again.
            Ok(()) => {}
            Err(Errno::ACCESS | Errno::AGAIN) if Instant::now() < end => {
                std::thread::sleep(ACQUIRE_RETRY_INTERVAL)
            }
            Err(Errno::ACCESS | Errno::AGAIN) => return Ok(None),
            // The file system has no locks. Continue without: two sandboxes of one pod, or two hubs of a node, are rare.
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "the file system has no locks");
                return Ok(Some(file));
            }
        }
    }
}

fn open(dir: &Path) -> io::Result<File> {
    // Not its parents: a process that starts late must not create a node's directory again that was removed.
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => created?,
    }
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.open(dir.join(LOCK_FILE))
}

/// Whether `file` is still the lock file in `dir`. Uses stat: opening and closing the file again would release the lock.
fn is_file_of(file: &File, dir: &Path) -> bool {
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let current = std::fs::symlink_metadata(dir.join(LOCK_FILE)).map(identity);
    let opened = file.metadata().map(identity);
    opened.is_ok_and(|opened| current.is_ok_and(|current| current == opened))
}

/// Whether there is a lock file. Opens no descriptor, so it does not release a lock of the calling process.
pub fn exists(dir: &Path) -> io::Result<bool> {
    dir.join(LOCK_FILE).try_exists()
}

/// Kills the process that holds the lock, if it is not the calling one. Returns whether there was one.
pub fn kill_holder(dir: &Path) -> bool {
    // The pid cannot be reused while the process still holds the lock.
    holder(dir).is_some_and(|pid| linux::process::kill_if(pid, || holder(dir) == Some(pid)))
}

/// The pid of the process that holds the lock, if it is not the calling one. `None` also if the check fails.
pub fn holder(dir: &Path) -> Option<i32> {
    find_holder(dir).ok().flatten()
}

/// The pid of the process that holds the lock, if it is not the calling one. An error means that one may hold it.
pub fn find_holder(dir: &Path) -> io::Result<Option<i32>> {
    let lock = match query(dir) {
        // If the file system has no locks, none is held.
        Err(error) if is_absent(&error) || is_unsupported(&error) => None,
        lock => lock?,
    };
    let pid = lock.and_then(|lock| lock.pid);
    Ok(pid.map(|pid| pid.as_raw_nonzero().get()))
}

fn is_absent(error: &io::Error) -> bool {
    [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind())
}

/// Whether another process holds the lock. If the check fails, assume that one does.
///
/// Never call this, or [`holder`], in the process that holds the lock: closing any descriptor of the file releases it.
pub fn is_held(dir: &Path) -> bool {
    query(dir).map_or_else(
        |error| !is_absent(&error) && !is_unsupported(&error),
        |lock| lock.is_some(),
    )
}

/// Whether the file system has locks. As with [`is_held`], not for the process that holds this one.
pub fn is_supported(dir: &Path) -> bool {
    query(dir).map_or_else(|error| !is_unsupported(&error), |_| true)
}

/// The lock that another process holds.
fn query(dir: &Path) -> io::Result<Option<Flock>> {
    let file = File::open(dir.join(LOCK_FILE))?;
    Ok(fcntl_getlk(&file, &Flock::from(FlockType::WriteLock))?)
}

fn is_unsupported(error: &io::Error) -> bool {
    let unsupported = [Errno::NOLCK, Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS];
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| unsupported.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::testing::LockHolder;
    use super::*;

    #[test]
    fn lock_has_one_holder_that_is_found() {
        if LockHolder::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        assert_eq!(holder(&dir), None);
        let mut other = LockHolder::start(
            "process_lock::tests::lock_has_one_holder_that_is_found",
            &dir,
        );
        assert_eq!(holder(&dir), Some(other.pid()));
        assert!(is_held(&dir));
        let error = acquire_within(&dir, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("another sandbox"), "{error}");

        other.release();
        let _lock = acquire(&dir).unwrap();
        other.end();
        assert_eq!(holder(&dir), None);
        assert!(!is_held(&dir) && !is_held(&home.path().join("no-pod")));
    }

    #[test]
    fn only_holder_is_killed() {
        if LockHolder::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        assert!(!kill_holder(&dir));
        let other = LockHolder::start("process_lock::tests::only_holder_is_killed", &dir);
        assert!(kill_holder(&dir));
        other.wait();
        assert!(!kill_holder(&dir));
        // The calling process does not kill itself.
        let _lock = acquire(&dir).unwrap();
        assert!(!kill_holder(&dir));
    }

    #[test]
    fn replaced_lock_file_is_detected() {
        let home = tempfile::tempdir().unwrap();
        let file = open(home.path()).unwrap();
        assert!(is_file_of(&file, home.path()));
        std::fs::remove_file(home.path().join(LOCK_FILE)).unwrap();
        assert!(!is_file_of(&file, home.path()));
        let replacement = open(home.path()).unwrap();
        assert!(!is_file_of(&file, home.path()) && is_file_of(&replacement, home.path()));
    }

    /// The holder of the lock removes the file while another process waits for the lock.
    #[test]
    fn waiter_does_not_lock_removed_file() {
        if LockHolder::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("pod");
        let other = LockHolder::start(
            "process_lock::tests::waiter_does_not_lock_removed_file",
            &dir,
        );
        let waiting = {
            let dir = dir.clone();
            std::thread::spawn(move || acquire(&dir).unwrap())
        };
        std::thread::sleep(4 * ACQUIRE_RETRY_INTERVAL);
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(linux::process::kill_if(other.pid(), || true));
        other.wait();
        let lock = waiting.join().unwrap();
        assert!(is_file_of(&lock, &dir));
    }
}

/// For tests that need a process that holds a lock.
#[cfg(test)]
pub mod testing {
    use std::io::{Read, Write};
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    use super::acquire;

    /// Environment variable for the other process: the directory to lock.
    const DIR: &str = "CORACLE_TEST_HOLDER";

    /// Another process that holds a lock: a process cannot see its own locks.
    pub struct LockHolder(Child);

    impl LockHolder {
        /// Whether [`Self::start`] started the calling process. If so, this has held the lock until released, and the test must return.
        pub fn is_this_process() -> bool {
            let Some(dir) = std::env::var_os(DIR) else {
                return false;
            };
            let _lock = acquire(Path::new(&dir)).unwrap();
            eprint!("ready");
            let _ = std::io::stdin().read(&mut [0]);
            true
        }

        /// Starts the process: this program with the test `test` alone, which must begin with [`Self::is_this_process`].
        pub fn start(test: &str, dir: &Path) -> Self {
            let mut process = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture", test])
                .env(DIR, dir)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut output = process.stderr.take().unwrap();
            output.read_exact(&mut [0; 5]).unwrap();
            Self(process)
        }

        /// Its process id.
        pub fn pid(&self) -> i32 {
            self.0.id().cast_signed()
        }

        /// Waits for the process after it was killed.
        pub fn wait(mut self) {
            assert_eq!(self.0.wait().unwrap().signal(), Some(9));
        }

        /// Makes the process exit, which releases the lock.
        pub fn release(&mut self) {
            if let Some(mut input) = self.0.stdin.take() {
                input.write_all(b"\n").unwrap();
            }
        }

        /// Releases the lock and waits for the process.
        pub fn end(mut self) {
            self.release();
            assert!(self.0.wait().unwrap().success());
        }
    }
}
