//! The node's own directory: sockets, unpacked images, and what pods write. It is made by the first agent of a node,
//! found again by those after it, and removed by whoever ends last.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kubelet::NodeKey;
use linux::process::Fork;
use rustix::fs::{Mode, OFlags};
use rustix::process::WaitOptions;
use rustix::thread::UnshareFlags;
use sha2::{Digest, Sha256};

use crate::sandbox_role::lock;

/// The variable that marks a node's hub and sandboxes. They have it as an argument, because no other process can read the environment of
/// processes that hide.
pub const MARK: &str = "CORACLE_NODE";
/// What the names of nodes' directories begin with.
const PREFIX: &str = "coracle-";
/// The file in it that says whose it is: others may share the file system.
const HOST: &str = "host";
/// Longer than any host's name.
const LONGEST_HOST: u64 = 1024;
/// Agents come back, and hubs end, long before.
const ABANDONED_AFTER: Duration = Duration::from_secs(300);

/// Where this node keeps its things, and the key to its pods.
#[derive(Clone, Debug)]
pub struct NodePlace {
    /// On a local disk, for this user alone.
    pub dir: PathBuf,
    /// Makes the tokens of sandboxes.
    pub key: NodeKey,
    /// The value of [`MARK`], by which this node's processes are found. It reveals nothing to other users.
    pub mark: String,
}

impl NodePlace {
    /// What the cluster's secret says of this node. Nobody else can guess the directory's name, nor be there first.
    pub fn new(secret: &str, node: &str) -> Self {
        let text = |what: &str| -> String {
            let bytes = derive(secret, what, node).into_iter().take(16);
            bytes.map(|byte| format!("{byte:02x}")).collect()
        };
        Self {
            dir: scratch().join(format!("{PREFIX}{}", text("directory"))),
            key: NodeKey(derive(secret, "key", node)),
            mark: text("mark"),
        }
    }

    /// Makes the directory, or finds that of an agent before us.
    pub fn make(&self) -> io::Result<()> {
        match std::fs::DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        let found = std::fs::symlink_metadata(&self.dir)?;
        let ours = found.is_dir()
            && found.uid() == rustix::process::geteuid().as_raw()
            && found.permissions().mode() & 0o077 == 0;
        if !ours {
            return Err(io::Error::other("it belongs to somebody else"));
        }
        // On a full disk too pods may run that write nothing; without this the directory is not swept, that is all.
        if let Err(error) = std::fs::write(self.dir.join(HOST), super::hostname()) {
            tracing::warn!(dir = %self.dir.display(), %error, "cannot write to the node's directory");
        }
        Ok(())
    }

    /// Removes the directories of this user's clusters of which everything on this node was killed at once. The calling
    /// process must have a single thread.
    pub fn sweep() {
        for entry in std::fs::read_dir(scratch()).into_iter().flatten().flatten() {
            if is_abandoned(&entry.path()) {
                Self::remove_dir(&entry.path());
            }
        }
    }

    /// The argument that marks processes of this node.
    pub fn mark_argument(&self) -> String {
        format!("{MARK}={}", self.mark)
    }

    /// The hub's socket.
    pub fn hub_socket(&self) -> PathBuf {
        self.dir.join("hub.sock")
    }

    /// Removes all of it, unless a pod in it still runs. The calling process must have a single thread: files of containers belong
    /// to ids that only a process in a user namespace may touch.
    pub fn remove(&self) {
        Self::remove_dir(&self.dir);
    }

    fn remove_dir(dir: &Path) {
        match linux::process::fork() {
            Ok(Fork::Child) => {
                if let Err(error) = remove_node(dir) {
                    tracing::warn!(dir = %dir.display(), %error, "cannot remove a node's directory");
                }
                std::process::exit(0)
            }
            Ok(Fork::Parent(child)) => {
                let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
            }
            Err(error) => tracing::warn!(%error, "cannot remove the node's directory"),
        }
    }
}

/// Whether this is a node's directory of ours that nobody uses any more.
///
/// Other users make what they like beside ours: nothing in a directory is opened before it is known to be ours.
fn is_abandoned(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    let id = name.and_then(|name| name.strip_prefix(PREFIX));
    let is_ours = id.is_some_and(|id| id.len() == 32 && id.bytes().all(|c| c.is_ascii_hexdigit()));
    if !is_ours {
        return false;
    }
    let Ok(opened) = open_own_dir(dir) else {
        return false;
    };
    let is_old = opened
        .metadata()
        .and_then(|found| found.modified())
        .is_ok_and(|time| time.elapsed().is_ok_and(|age| age > ABANDONED_AFTER));
    is_old && read_host(&opened).is_ok_and(|host| host == super::hostname()) && !is_in_use(dir)
}

/// Whether any process of a node other than this one lives: an agent, its guard, the hub, or a sandbox. Not for the guard itself,
/// which would lose its lock: see [`lock::is_held`].
pub fn is_in_use(dir: &Path) -> bool {
    is_guarded(dir) || is_used_below_guard(dir)
}

/// Whether an agent, the hub or a sandbox of a node lives.
pub fn is_used_below_guard(dir: &Path) -> bool {
    UnixStream::connect(kubelet_socket(dir)).is_ok()
        || network::hub::is_there(&dir.join("hub.sock"))
        || has_pods(dir)
}

/// Whether the guard of an agent lives. As long as it does the node has an agent, or is about to have one again.
pub fn is_guarded(dir: &Path) -> bool {
    lock::is_held(dir)
}

/// Kills the sandboxes of a node, and says how many there were. They hold their locks, whether or not `/proc` shows them.
pub fn kill_sandboxes(dir: &Path) -> usize {
    let pods = std::fs::read_dir(dir.join("pods")).into_iter().flatten();
    pods.flatten()
        .filter(|pod| lock::kill_holder(&pod.path()))
        .count()
}

/// Whether a sandbox lives. If the check fails, assume that one does.
pub fn has_pods(dir: &Path) -> bool {
    match std::fs::read_dir(dir.join("pods")) {
        Ok(mut pods) => pods.any(|pod| pod.map_or(true, |pod| lock::is_held(&pod.path()))),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Removes a node's directory as [`remove`] does, unless a pod in it still runs.
pub fn remove_node(dir: &Path) -> io::Result<()> {
    refuse_with_pods(dir)?;
    remove(dir)
}

/// An error if a pod in a node's directory still runs: its volumes, logs and lock must not be removed.
pub fn refuse_with_pods(dir: &Path) -> io::Result<()> {
    match has_pods(dir) {
        true => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a pod in it still runs",
        )),
        false => Ok(()),
    }
}

/// Opens a directory that belongs to this user; an error if it is anything else.
fn open_own_dir(dir: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = File::from(rustix::fs::open(dir, flags, Mode::empty())?);
    own(&opened.metadata()?)?;
    Ok(opened)
}

/// The host's name in a node's directory.
fn read_host(dir: &File) -> io::Result<String> {
    // Neither a link nor a FIFO without a writer can make us wait or read something else.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(dir, HOST, flags, Mode::empty())?);
    let found = file.metadata()?;
    own(&found)?;
    if !found.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = String::new();
    file.take(LONGEST_HOST).read_to_string(&mut text)?;
    Ok(text)
}

fn own(found: &Metadata) -> io::Result<()> {
    if found.uid() == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    Err(io::Error::other("it belongs to another user"))
}

/// Removes a directory that containers have written to, in a user namespace that this process, which must have a single
/// thread, moves into if it has to.
pub fn remove(dir: &Path) -> io::Result<()> {
    // Without containers' files nothing special is needed.
    if linux::remove::tree(dir).is_ok() {
        return Ok(());
    }
    linux::namespace::enter_as_root(UnshareFlags::empty())?;
    linux::remove::tree(dir)
}

/// The same from a process with threads: another one does it.
pub async fn remove_elsewhere(dir: PathBuf) -> io::Result<()> {
    let output = tokio::process::Command::new("/proc/self/exe")
        .args(["internal", "remove"])
        .arg(&dir)
        .stdin(std::process::Stdio::null())
        .output()
        .await?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(words.trim().to_owned()))
}

/// The socket at which sandboxes find their kubelet, in a node's directory.
pub fn kubelet_socket(dir: &Path) -> PathBuf {
    dir.join("kubelet.sock")
}

/// Where unpacked layers are, in a node's directory.
pub fn layers(dir: &Path) -> PathBuf {
    dir.join("layers")
}

/// The node's local scratch.
pub fn scratch() -> PathBuf {
    let dir = std::env::var_os("TMPDIR").map(PathBuf::from);
    dir.filter(|dir| dir.is_absolute() && dir.is_dir())
        .unwrap_or_else(|| "/tmp".into())
}

fn derive(secret: &str, what: &str, node: &str) -> [u8; 32] {
    let text = format!("{what}\0{node}\0{secret}");
    Sha256::digest(text.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::FileTimes;
    use std::sync::mpsc;
    use std::time::SystemTime;

    /// A node's directory that is old enough to be swept, with whatever `fill` puts into it.
    fn old_dir(tmp: &Path, name: char, fill: impl Fn(&Path)) -> PathBuf {
        let dir = tmp.join(format!("{PREFIX}{}", name.to_string().repeat(32)));
        std::fs::create_dir(&dir).unwrap();
        fill(&dir.join(HOST));
        let before = SystemTime::now() - 2 * ABANDONED_AFTER;
        let times = FileTimes::new().set_modified(before);
        File::open(&dir).unwrap().set_times(times).unwrap();
        dir
    }

    /// [`is_abandoned`], or `None` if it does not return.
    fn judged(dir: PathBuf) -> Option<bool> {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || tell.send(is_abandoned(&dir)));
        told.recv_timeout(Duration::from_secs(20)).ok()
    }

    #[test]
    fn only_own_regular_host_files_are_read() {
        let tmp = tempfile::tempdir().unwrap();
        let host = super::super::hostname();
        let whole = old_dir(tmp.path(), '0', |path| std::fs::write(path, &host).unwrap());
        assert_eq!(judged(whole.clone()), Some(true));
        let fifo = old_dir(tmp.path(), '1', |path| {
            let made = std::process::Command::new("mkfifo").arg(path).status();
            assert!(made.unwrap().success());
        });
        assert_eq!(judged(fifo), Some(false));
        let endless = old_dir(tmp.path(), '2', |path| {
            std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        });
        assert_eq!(judged(endless), Some(false));
        let long = old_dir(tmp.path(), '3', |path| {
            std::fs::write(path, host.repeat(10_000)).unwrap();
        });
        assert_eq!(judged(long), Some(false));
        // Through a link, another's directory can pass for ours.
        let link = tmp.path().join(format!("{PREFIX}{}", "4".repeat(32)));
        std::os::unix::fs::symlink(&whole, &link).unwrap();
        assert_eq!(judged(link), Some(false));
        if rustix::process::geteuid().is_root() {
            let other = old_dir(tmp.path(), '5', |path| std::fs::write(path, &host).unwrap());
            std::os::unix::fs::chown(&other, Some(2002), None).unwrap();
            assert_eq!(judged(other), Some(false));
        }
    }

    #[test]
    fn every_node_has_its_own_place_and_always_the_same() {
        let place = |secret, node| NodePlace::new(secret, node).dir;
        assert_eq!(place("s", "node1"), place("s", "node1"));
        assert_ne!(place("s", "node1"), place("s", "node2"));
        assert_ne!(place("s", "node1"), place("t", "node1"));
    }

    #[test]
    fn a_directory_with_a_running_pod_is_not_removed() {
        let test = "node::place::tests::a_directory_with_a_running_pod_is_not_removed";
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

/// For tests of what happens while a pod runs.
#[cfg(test)]
pub mod testing {
    use std::io::{Read, Write};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    use super::lock;

    /// For the other process: the directory to lock.
    const DIR: &str = "CORACLE_TEST_POD";

    /// Another process that holds the lock of a pod: a process does not see its own.
    pub struct LockedPod(Child);

    impl LockedPod {
        /// Whether the calling process is the one that [`Self::start`] started. Then it has held the lock, and is to end.
        pub fn is_this_process() -> bool {
            let Some(dir) = std::env::var_os(DIR) else {
                return false;
            };
            let _lock = lock::take(Path::new(&dir)).unwrap();
            eprint!("taken");
            let _ = std::io::stdin().read(&mut [0]);
            true
        }

        /// Starts it: this program again with the test `test` alone, which must begin with [`Self::is_this_process`].
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

        /// Waits for it, after another process has killed it.
        pub fn wait(mut self) {
            assert!(!self.0.wait().unwrap().success());
        }

        /// Ends it, and thereby releases the lock.
        pub fn end(mut self) {
            self.0.stdin.take().unwrap().write_all(b"\n").unwrap();
            assert!(self.0.wait().unwrap().success());
        }
    }
}
