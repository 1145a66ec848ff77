//! Removes a node's directory after its last process has ended, for whatever reason.
//!
//! One rule tells whether a directory is in use: every process that uses it holds a lock in it for its whole life
//! ([`crate::process_lock`]), and to remove the directory a process must hold all of these locks itself.
//!
//! | Lock | Holder |
//! |---|---|
//! | `lock` | the agent's guard: the node has an agent, or will get one again |
//! | `hub/lock`, `hub-inside/lock` | the processes of the hub |
//! | `pods/UID/lock` | the pod's sandbox |
//!
//! Three processes apply the rule: the guard when the cluster ends, the janitor ([`crate::roles::janitor`]) when the guard was killed, and
//! the guard of the user's next cluster when the janitor was killed too.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linux::process::ForkResult;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::WaitOptions;
use rustix::thread::UnshareFlags;

use crate::node_dir::{self, DIR_PREFIX, HOST_FILE};
use crate::process_lock;

/// The extension of a directory that is being removed begins with this.
const REMOVED_PREFIX: &str = "removed-";
/// Limit on the host name that is read.
const MAX_HOST_LEN: u64 = 1024;
/// Directories that have not changed for this long count as abandoned. Agents are restarted, and hubs exit, long before.
const ABANDONED_AFTER: Duration = Duration::from_secs(300);
/// Attempts to remove a directory, and the delay between them.
const REMOVE_ATTEMPTS: u32 = 10;
const REMOVE_INTERVAL: Duration = Duration::from_millis(100);
/// Time-out of [`kill_processes`].
const LEFTOVER_KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The directories with the locks of a node's hub and sandboxes.
fn lock_dirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut dirs = node_dir::hub_locks(dir).to_vec();
    dirs.extend(pod_dirs(dir)?);
    Ok(dirs)
}

fn pod_dirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(node_dir::pods(dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        pods => pods?.map(|pod| Ok(pod?.path())).collect(),
    }
}

/// Whether the guard of an agent runs. If so, the node has an agent or will get one again. The guard itself must not call this: see
/// [`process_lock::is_held`].
pub fn is_guarded(dir: &Path) -> bool {
    process_lock::is_held(dir)
}

/// Whether the hub or a sandbox runs. If the check fails, assume that one does.
pub fn has_processes(dir: &Path) -> bool {
    let [hub, _] = node_dir::hub_locks(dir);
    is_any_held(lock_dirs(dir)) || (!process_lock::is_supported(&hub) && has_listener(dir))
}

/// Whether the agent or the hub listens. Only for file systems without locks: a hub that is asked all the time never finds itself idle.
fn has_listener(dir: &Path) -> bool {
    let sockets = node_dir::hub_sockets(dir);
    has_agent(dir)
        || [sockets.outside, sockets.inside]
            .iter()
            .any(|socket| network::hub::is_listening(socket))
}

/// Whether an agent listens. Does not wait for one that hangs.
pub fn has_agent(dir: &Path) -> bool {
    let connect = || -> rustix::io::Result<()> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(unix, stream, flags, None)?;
        rustix::net::connect(
            &socket,
            &SocketAddrUnix::new(node_dir::kubelet_socket(dir))?,
        )
    };
    matches!(connect(), Ok(()) | Err(Errno::AGAIN))
}

/// Whether a sandbox runs. If the check fails, assume that one does.
pub fn has_pods(dir: &Path) -> bool {
    is_any_held(pod_dirs(dir))
}

fn is_any_held(dirs: io::Result<Vec<PathBuf>>) -> bool {
    dirs.map_or(true, |dirs| {
        dirs.iter().any(|dir| process_lock::is_held(dir))
    })
}

/// Whether a directory holds the logs or volumes of pods, which the node's next agent needs.
pub fn has_data(dir: &Path) -> bool {
    [node_dir::pods(dir), node_dir::local_volumes(dir)]
        .iter()
        .any(|dir| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()))
}

/// Kills the hub and the sandboxes of a node. Sandboxes that are steps, and processes that an agent with another guard started, are
/// not descendants of this guard. Does not depend on `/proc`, which may hide them.
pub fn kill_processes(dir: &Path) {
    let end = Instant::now() + LEFTOVER_KILL_TIMEOUT;
    while Instant::now() < end {
        let dirs = lock_dirs(dir).unwrap_or_default();
        let killed = dirs.iter().filter(|dir| process_lock::kill_holder(dir));
        if killed.count() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Removes a node's directory, unless a process uses it. Returns whether it is gone. The calling process must have a single thread
/// and must not hold a lock of the directory.
pub fn remove_unused(dir: &Path) -> io::Result<bool> {
    // Check first: a lock that is taken only for this check would look like a guard to others.
    if is_guarded(dir) || has_processes(dir) {
        return Ok(false);
    }
    let Some(_locks) = lock_all(dir)? else {
        return Ok(false);
    };
    // An agent that starts now creates a new directory, which has new locks. The name is random, because other users see that of the
    // directory, and could create one that is derived from it.
    let removed = dir.with_extension(format!("{REMOVED_PREFIX}{}", random_name()?));
    match std::fs::rename(dir, &removed) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        renamed => renamed?,
    }
    remove_while_written(&removed)?;
    Ok(true)
}

/// Removes a directory to which a container that is being killed may still write.
fn remove_while_written(dir: &Path) -> io::Result<()> {
    for _ in 1..REMOVE_ATTEMPTS {
        if remove_tree(dir).is_ok() {
            return Ok(());
        }
        std::thread::sleep(REMOVE_INTERVAL);
    }
    remove_tree(dir)
}

fn random_name() -> io::Result<String> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Takes all locks of a directory; `None` if another process holds one.
fn lock_all(dir: &Path) -> io::Result<Option<Vec<File>>> {
    let mut locks = Vec::new();
    for dir in [vec![dir.to_owned()], lock_dirs(dir)?].concat() {
        if process_lock::exists(&dir)? {
            match process_lock::try_acquire(&dir, Duration::ZERO)? {
                Some(lock) => locks.push(lock),
                None => return Ok(None),
            }
        }
    }
    Ok(Some(locks))
}

/// Removes the directory of a guard that has released its lock, and directories of this user's clusters whose processes on this node
/// were all killed at once. The calling process must have a single thread.
pub fn remove_own_and_abandoned(own: &Path) {
    remove_in_child(own);
    let entries = std::fs::read_dir(node_dir::scratch_dir());
    for entry in entries.into_iter().flatten().flatten() {
        if is_abandoned(&entry.path()) {
            remove_in_child(&entry.path());
        }
    }
}

/// Removes a directory in a child: the files of containers belong to subordinate ids, so the process enters a user namespace.
fn remove_in_child(dir: &Path) {
    match linux::process::fork() {
        Ok(ForkResult::Child) => {
            if let Err(error) = remove_unused(dir) {
                tracing::warn!(dir = %dir.display(), %error, "cannot remove the node's directory");
            }
            std::process::exit(0)
        }
        Ok(ForkResult::Parent(child)) => {
            let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
        }
        Err(error) => tracing::warn!(%error, "cannot remove the node's directory"),
    }
}

/// Whether this is a node directory of this user that has not changed for a while.
///
/// Other users can create entries with such names, so check the owner of a directory before opening anything in it.
fn is_abandoned(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    let id = name.and_then(|name| name.strip_prefix(DIR_PREFIX));
    let unfinished = id.and_then(|id| {
        let (id, extension) = id.split_once('.')?;
        extension.starts_with(REMOVED_PREFIX).then_some(id)
    });
    let id = unfinished.or(id);
    let is_node_dir =
        id.is_some_and(|id| id.len() == 32 && id.bytes().all(|c| c.is_ascii_hexdigit()));
    if !is_node_dir {
        return false;
    }
    let Ok(opened) = open_own_dir(dir) else {
        return false;
    };
    let is_old = opened
        .metadata()
        .and_then(|metadata| metadata.modified())
        .is_ok_and(|time| time.elapsed().is_ok_and(|age| age > ABANDONED_AFTER));
    let is_ours = || read_host(&opened).is_ok_and(|host| host == node_dir::hostname());
    // The rest of a directory that a killed process was removing may have no host file, and any host may remove it.
    is_old && (unfinished.is_some() || is_ours())
}

/// Opens a directory of this user; fails on any other file, and on links.
fn open_own_dir(dir: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = File::from(rustix::fs::open(dir, flags, Mode::empty())?);
    check_owner(&opened.metadata()?)?;
    Ok(opened)
}

/// Reads the host name from a node's directory.
fn read_host(dir: &File) -> io::Result<String> {
    // Do not follow links, and do not block on a FIFO without a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(dir, HOST_FILE, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    check_owner(&metadata)?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = String::new();
    file.take(MAX_HOST_LEN).read_to_string(&mut text)?;
    Ok(text)
}

fn check_owner(metadata: &Metadata) -> io::Result<()> {
    if metadata.uid() == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    Err(io::Error::other("it belongs to another user"))
}

/// Removes a directory that containers have written to. The calling process must have a single thread. It moves into a user
/// namespace if it cannot remove all files otherwise.
pub fn remove_tree(dir: &Path) -> io::Result<()> {
    // Sufficient if no files belong to subordinate ids.
    if linux::remove::tree(dir).is_ok() {
        return Ok(());
    }
    linux::namespace::enter_as_root(UnshareFlags::empty())?;
    linux::remove::tree(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_lock::testing::LockHolder;
    use std::fs::FileTimes;
    use std::sync::mpsc;
    use std::time::SystemTime;

    /// Creates a node directory that is old enough to be swept, with a host file made by `fill`.
    fn old_dir(tmp: &Path, name: char, fill: impl Fn(&Path)) -> PathBuf {
        let dir = tmp.join(format!("{DIR_PREFIX}{}", name.to_string().repeat(32)));
        std::fs::create_dir(&dir).unwrap();
        fill(&dir.join(HOST_FILE));
        let modified = SystemTime::now() - 2 * ABANDONED_AFTER;
        let times = FileTimes::new().set_modified(modified);
        File::open(&dir).unwrap().set_times(times).unwrap();
        dir
    }

    /// The result of [`is_abandoned`], or `None` if it blocks.
    fn is_abandoned_in_time(dir: PathBuf) -> Option<bool> {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || sender.send(is_abandoned(&dir)));
        receiver.recv_timeout(Duration::from_secs(20)).ok()
    }

    #[test]
    fn only_own_regular_host_files_are_read() {
        let tmp = tempfile::tempdir().unwrap();
        let host = node_dir::hostname();
        let intact = old_dir(tmp.path(), '0', |path| std::fs::write(path, &host).unwrap());
        assert_eq!(is_abandoned_in_time(intact.clone()), Some(true));
        let fifo = old_dir(tmp.path(), '1', |path| {
            let made = std::process::Command::new("mkfifo").arg(path).status();
            assert!(made.unwrap().success());
        });
        assert_eq!(is_abandoned_in_time(fifo), Some(false));
        let endless = old_dir(tmp.path(), '2', |path| {
            std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        });
        assert_eq!(is_abandoned_in_time(endless), Some(false));
        let long = old_dir(tmp.path(), '3', |path| {
            std::fs::write(path, host.repeat(10_000)).unwrap();
        });
        assert_eq!(is_abandoned_in_time(long), Some(false));
        // A link may point to another user's directory.
        let link = tmp.path().join(format!("{DIR_PREFIX}{}", "4".repeat(32)));
        std::os::unix::fs::symlink(&intact, &link).unwrap();
        assert_eq!(is_abandoned_in_time(link), Some(false));
        if rustix::process::geteuid().is_root() {
            let other = old_dir(tmp.path(), '5', |path| std::fs::write(path, &host).unwrap());
            std::os::unix::fs::chown(&other, Some(2002), None).unwrap();
            assert_eq!(is_abandoned_in_time(other), Some(false));
        }
    }

    #[test]
    fn unlocked_directory_is_removed() {
        let test = "cleanup::tests::unlocked_directory_is_removed";
        if LockHolder::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let node = home.path().join("node");
        assert!(remove_unused(&node).unwrap());
        for lock in ["", "hub", "hub-inside", "pods/uid"] {
            std::fs::create_dir_all(node.join("pods")).unwrap();
            let lock = node.join(lock);
            let holder = LockHolder::start(test, &lock);
            assert_eq!(is_guarded(&node), lock == node);
            assert_eq!(has_processes(&node), lock != node);
            assert!(!remove_unused(&node).unwrap() && lock.exists());
            kill_processes(&node);
            if lock == node {
                assert!(!remove_unused(&node).unwrap());
                holder.end();
            } else {
                holder.wait();
            }
            assert!(remove_unused(&node).unwrap());
            assert!(std::fs::read_dir(home.path()).unwrap().next().is_none());
        }
    }

    #[test]
    fn remains_of_interrupted_removal_are_abandoned() {
        let tmp = tempfile::tempdir().unwrap();
        let node = old_dir(tmp.path(), '0', |_| {});
        let remains = node.with_extension("removed-0123456789abcdef");
        std::fs::rename(&node, &remains).unwrap();
        assert_eq!(is_abandoned_in_time(remains.clone()), Some(true));
        let other = remains.with_extension("other");
        std::fs::rename(&remains, &other).unwrap();
        assert_eq!(is_abandoned_in_time(other), Some(false));
    }
}
