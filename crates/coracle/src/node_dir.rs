//! The node's directory: sockets, unpacked layers, and the pods' data. The first agent of a node creates it, later agents
//! adopt it, and the node's last process removes it.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kubelet::NodeKey;
use linux::process::ForkResult;
use network::hub::HubSockets;
use rustix::fs::{Mode, OFlags};
use rustix::process::WaitOptions;
use rustix::thread::UnshareFlags;
use sha2::{Digest, Sha256};

use crate::pod_lock;

/// The variable that marks a node's hub and sandboxes. They carry it as an argument, because the environment of non-dumpable
/// processes cannot be read.
pub const NODE_MARK: &str = "CORACLE_NODE";
/// Prefix of the names of node directories.
const DIR_PREFIX: &str = "coracle-";
/// A file with the host's name, because several hosts may share the file system.
const HOST_FILE: &str = "host";
/// Limit on the host name that is read.
const MAX_HOST_LEN: u64 = 1024;
/// Age after which a directory may be abandoned. Agents are restarted, and hubs exit, long before.
const ABANDONED_AFTER: Duration = Duration::from_secs(300);

/// The node's directory, and the secrets derived for this node.
#[derive(Clone, Debug)]
pub struct NodeDir {
    /// The path, on a local disk, accessible to this user alone.
    pub dir: PathBuf,
    /// The key from which the tokens of sandboxes are derived.
    pub key: NodeKey,
    /// Value of [`NODE_MARK`]: identifies this node's processes and reveals nothing about the secret.
    pub mark: String,
}

impl NodeDir {
    /// Derives everything from the cluster's secret. Other users cannot guess the directory's name and create it first.
    pub fn new(secret: &str, node: &str) -> Self {
        let derived_text = |purpose: &str| -> String {
            let bytes = derive(secret, purpose, node).into_iter().take(16);
            bytes.map(|byte| format!("{byte:02x}")).collect()
        };
        Self {
            dir: scratch_dir().join(format!("{DIR_PREFIX}{}", derived_text("directory"))),
            key: NodeKey(derive(secret, "key", node)),
            mark: derived_text("mark"),
        }
    }

    /// Creates the directory, or adopts that of an earlier agent.
    pub fn create(&self) -> io::Result<()> {
        match std::fs::DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created?,
        }
        let metadata = std::fs::symlink_metadata(&self.dir)?;
        let is_private = metadata.is_dir()
            && metadata.uid() == rustix::process::geteuid().as_raw()
            && metadata.permissions().mode() & 0o077 == 0;
        if !is_private {
            return Err(io::Error::other(
                "it belongs to another user, or others can access it",
            ));
        }
        // Not fatal: pods that write nothing can run on a full disk. Without this file, the directory is never removed as abandoned.
        if let Err(error) = std::fs::write(self.dir.join(HOST_FILE), hostname()) {
            tracing::warn!(dir = %self.dir.display(), %error, "cannot write to the node's directory");
        }
        Ok(())
    }

    /// Removes directories of this user's clusters whose processes on this node were all killed at once. The calling process must
    /// have a single thread.
    pub fn remove_abandoned() {
        for entry in std::fs::read_dir(scratch_dir())
            .into_iter()
            .flatten()
            .flatten()
        {
            if is_abandoned(&entry.path()) {
                Self::remove_dir(&entry.path());
            }
        }
    }

    /// The argument that marks the node's processes.
    pub fn mark_argument(&self) -> String {
        format!("{NODE_MARK}={}", self.mark)
    }

    /// Where the node's hub listens.
    pub fn hub_sockets(&self) -> HubSockets {
        hub_sockets(&self.dir)
    }

    /// Removes the directory, unless one of its pods still runs. The calling process must have a single thread: the files of
    /// containers belong to subordinate ids, so a child enters a user namespace to remove them.
    pub fn remove(&self) {
        Self::remove_dir(&self.dir);
    }

    fn remove_dir(dir: &Path) {
        match linux::process::fork() {
            Ok(ForkResult::Child) => {
                if let Err(error) = remove_node(dir) {
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
}

/// Whether this is a node directory of this user that no process uses any more.
///
/// Other users can create entries with such names, so check the owner of a directory before opening anything in it.
fn is_abandoned(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    let id = name.and_then(|name| name.strip_prefix(DIR_PREFIX));
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
    is_old && read_host(&opened).is_ok_and(|host| host == hostname()) && !is_in_use(dir)
}

/// Whether any process of a node, other than the calling one, runs: an agent, its guard, the hub, or a sandbox. The guard itself
/// must not call this, because it would lose its lock: see [`pod_lock::is_held`].
pub fn is_in_use(dir: &Path) -> bool {
    is_guarded(dir) || has_running_processes(dir)
}

/// Whether an agent, the hub or a sandbox of a node runs.
pub fn has_running_processes(dir: &Path) -> bool {
    UnixStream::connect(kubelet_socket(dir)).is_ok()
        || network::hub::is_listening(&hub_sockets(dir).outside)
        || network::hub::is_listening(&hub_sockets(dir).inside)
        || has_pods(dir)
}

/// Whether the guard of an agent runs. If so, the node has an agent or will get one again.
pub fn is_guarded(dir: &Path) -> bool {
    pod_lock::is_held(dir)
}

/// Kills the sandboxes of a node and returns how many there were. Finds them by their locks, so it does not depend on `/proc`.
pub fn kill_sandboxes(dir: &Path) -> usize {
    let entries = std::fs::read_dir(pods(dir)).into_iter().flatten();
    entries
        .flatten()
        .filter(|pod| pod_lock::kill_holder(&pod.path()))
        .count()
}

/// Whether a sandbox runs. If the check fails, assume that one does.
pub fn has_pods(dir: &Path) -> bool {
    match std::fs::read_dir(pods(dir)) {
        Ok(mut pods) => pods.any(|pod| pod.map_or(true, |pod| pod_lock::is_held(&pod.path()))),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Removes a node's directory as [`remove_tree`] does, unless one of its pods still runs.
pub fn remove_node(dir: &Path) -> io::Result<()> {
    ensure_no_pods(dir)?;
    remove_tree(dir)
}

/// Fails if a pod of the node still runs: its volumes, logs and lock must not be removed.
pub fn ensure_no_pods(dir: &Path) -> io::Result<()> {
    match has_pods(dir) {
        true => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a pod in it still runs",
        )),
        false => Ok(()),
    }
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

/// The socket, in a node's directory, to which sandboxes connect.
pub fn kubelet_socket(dir: &Path) -> PathBuf {
    dir.join("kubelet.sock")
}

/// Where the hub of a node listens, in the node's directory.
pub fn hub_sockets(dir: &Path) -> HubSockets {
    HubSockets {
        outside: dir.join("hub.sock"),
        inside: dir.join("hub-inside.sock"),
    }
}

/// The directory of all pods, in a node's directory.
pub fn pods(dir: &Path) -> PathBuf {
    dir.join("pods")
}

/// The directory of a pod, in a node's directory.
pub fn pod(dir: &Path, uid: &str) -> PathBuf {
    pods(dir).join(uid)
}

/// The directory of `local` persistent volumes, in a node's directory.
pub fn local_volumes(dir: &Path) -> PathBuf {
    dir.join("local")
}

/// The directory of unpacked layers, in a node's directory.
pub fn layers(dir: &Path) -> PathBuf {
    dir.join("layers")
}

/// The node's local scratch directory.
pub fn scratch_dir() -> PathBuf {
    let dir = std::env::var_os("TMPDIR").map(PathBuf::from);
    dir.filter(|dir| dir.is_absolute() && dir.is_dir())
        .unwrap_or_else(|| "/tmp".into())
}

fn derive(secret: &str, purpose: &str, node: &str) -> [u8; 32] {
    let text = format!("{purpose}\0{node}\0{secret}");
    Sha256::digest(text.as_bytes()).into()
}

pub fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let host = hostname();
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
    fn directory_depends_on_secret_and_node() {
        let dir = |secret, node| NodeDir::new(secret, node).dir;
        assert_eq!(dir("s", "node1"), dir("s", "node1"));
        assert_ne!(dir("s", "node1"), dir("s", "node2"));
        assert_ne!(dir("s", "node1"), dir("t", "node1"));
    }

    #[test]
    fn directory_with_running_pod_is_not_removed() {
        let test = "node_dir::tests::directory_with_running_pod_is_not_removed";
        if testing::LockedPod::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let node = home.path().join("node");
        std::fs::create_dir(&node).unwrap();
        assert!(!is_in_use(&node));
        let pod = testing::LockedPod::start(test, &node.join("pods/uid"));
        assert!(is_in_use(&node) && !is_guarded(&node));
        assert_eq!(
            remove_node(&node).unwrap_err().kind(),
            io::ErrorKind::ResourceBusy
        );
        assert!(node.join("pods/uid").exists());

        assert_eq!(kill_sandboxes(&node), 1);
        pod.wait();
        assert_eq!(kill_sandboxes(&node), 0);
        remove_node(&node).unwrap();
        assert!(!node.exists());
    }
}

/// For tests that need a running pod.
#[cfg(test)]
pub mod testing {
    use std::io::{Read, Write};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    use crate::pod_lock;

    /// Environment variable for the other process: the directory to lock.
    const DIR: &str = "CORACLE_TEST_POD";

    /// Another process that holds the lock of a pod: a process cannot see its own locks.
    pub struct LockedPod(Child);

    impl LockedPod {
        /// Whether [`Self::start`] started the calling process. If so, this has held the lock until released, and the test must return.
        pub fn is_this_process() -> bool {
            let Some(dir) = std::env::var_os(DIR) else {
                return false;
            };
            let _lock = pod_lock::acquire(Path::new(&dir)).unwrap();
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

        /// Waits for the process after it was killed.
        pub fn wait(mut self) {
            assert!(!self.0.wait().unwrap().success());
        }

        /// Ends the process, which releases the lock.
        pub fn end(mut self) {
            self.0.stdin.take().unwrap().write_all(b"\n").unwrap();
            assert!(self.0.wait().unwrap().success());
        }
    }
}
