//! The node's directory: sockets, unpacked layers, and the pods' data. The first agent of a node creates it, later agents
//! adopt it, and [`crate::cleanup`] removes it.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use kubelet::NodeKey;
use network::hub::HubSockets;
use sha2::{Digest, Sha256};

/// Prefix of the names of node directories.
pub const DIR_PREFIX: &str = "coracle-";
/// A file with the host's name, because several hosts may share the file system.
pub const HOST_FILE: &str = "host";

/// The node's directory, and the secrets derived for this node.
#[derive(Clone, Debug)]
pub struct NodeDir {
    /// The path, on a local disk, accessible to this user alone.
    pub dir: PathBuf,
    /// The key from which the tokens of sandboxes are derived.
    pub key: NodeKey,
}

impl NodeDir {
    /// Derives everything from the cluster's secret, so that other users cannot guess the directory's name and create it first.
    pub fn new(secret: &str, node: &str) -> Self {
        let id = derive(secret, "directory", node).into_iter().take(16);
        let id: String = id.map(|byte| format!("{byte:02x}")).collect();
        Self {
            dir: scratch_dir().join(format!("{DIR_PREFIX}{id}")),
            key: NodeKey(derive(secret, "key", node)),
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
        // Not fatal: pods that write nothing can run on a full disk. Without this file, the directory is not
        // removed if it is abandoned.
        if let Err(error) = std::fs::write(self.dir.join(HOST_FILE), hostname()) {
            tracing::warn!(dir = %self.dir.display(), %error, "cannot write to the node's directory");
        }
        Ok(())
    }
}

/// The socket, in a node's directory, to which sandboxes connect.
pub fn kubelet_socket(dir: &Path) -> PathBuf {
    dir.join("kubelet.sock")
}

/// The sockets of the node's hub, in a node's directory.
pub fn hub_sockets(dir: &Path) -> HubSockets {
    HubSockets {
        outside: dir.join("hub.sock"),
        inside: dir.join("hub-inside.sock"),
    }
}

/// The directories of the locks of the hub's two processes: outside its network namespace, and inside ([`network::hub`]).
pub fn hub_locks(dir: &Path) -> [PathBuf; 2] {
    [dir.join("hub"), dir.join("hub-inside")]
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

/// The node's local scratch directory: `TMPDIR`, else `/tmp`.
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

    #[test]
    fn directory_depends_on_secret_and_node() {
        let dir = |secret, node| NodeDir::new(secret, node).dir;
        assert_eq!(dir("s", "node1"), dir("s", "node1"));
        assert_ne!(dir("s", "node1"), dir("s", "node2"));
        assert_ne!(dir("s", "node1"), dir("t", "node1"));
    }
}
