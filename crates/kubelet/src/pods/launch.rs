//! The seam between the kubelet and whoever starts sandboxes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ContainerImage;
use pod_protocol::connection::LogBytes;
use pod_protocol::{LogQuery, PodState, Problem};
use sha2::{Digest, Sha256};

/// Starts sandboxes: by a fork on this node, as a step, or as a job.
pub trait Launcher: Send + Sync {
    /// Starts a sandbox and returns as soon as it is on its way. It reports by dialling the kubelet.
    fn launch(&self, launch: Launch) -> BoxFuture<'_, Result<Box<dyn Handle>, LaunchError>>;

    /// The sandbox of a pod that is there already: an earlier kubelet has started it, and it may not have dialled yet.
    fn find(&self, _uid: &str) -> Option<Box<dyn Handle>> {
        None
    }

    /// How a pod stood when its sandbox last wrote that down, for a sandbox that is gone; `None` if it never did.
    fn checkpoint(&self, _uid: &str) -> BoxFuture<'_, Option<PodState>> {
        Box::pin(std::future::ready(None))
    }

    /// Reads a log of a pod whose sandbox has exited; `None` if its log files are gone.
    fn logs(
        &self,
        _uid: &str,
        _query: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogBytes, Problem>>> {
        Box::pin(std::future::ready(None))
    }

    /// Removes a directory that containers have written to. Who starts sandboxes with more than one user id must also be
    /// able to remove files of all of them.
    fn remove(&self, dir: PathBuf) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(tokio::fs::remove_dir_all(dir))
    }

    /// The images that sandboxes find without a registry, for the Node's status.
    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        Box::pin(std::future::ready(Vec::new()))
    }
}

/// The annotation by which a pod says how it wants to be started.
pub const LAUNCHER_ANNOTATION: &str = "coracle.dev/launcher";

/// How a sandbox is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// As a process of the node's agent.
    #[default]
    Fork,
    /// Through the batch system, with a share of the node that is the pod's own for as long as its sandbox runs.
    Step,
}

impl Way {
    /// The way that a value of [`LAUNCHER_ANNOTATION`] names.
    pub(crate) fn named(value: &str) -> Option<Self> {
        match value {
            "fork" => Some(Self::Fork),
            "step" => Some(Self::Step),
            _ => None,
        }
    }
}

/// What a pod asks for, and all of its containers together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Thousandths of CPUs, as requested.
    pub cpu_millis: u64,
    /// Memory in bytes that it may use: its limit or, where it has none, what it requests.
    pub memory_bytes: u64,
    /// Extended resources by name, such as `nvidia.com/gpu`.
    pub extended: BTreeMap<String, u64>,
}

impl Needs {
    /// Whether those of `share` are enough.
    pub(crate) fn fit_in(&self, share: &Self) -> bool {
        // Without a request it may use all memory that there is.
        let memory = share.memory_bytes == 0
            || (self.memory_bytes > 0 && self.memory_bytes <= share.memory_bytes);
        memory && self.cpu_millis <= share.cpu_millis && self.extended == share.extended
    }
}

/// What a sandbox is started with; all else it learns over its connection.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The pod's uid.
    pub uid: String,
    /// The pod's namespace, for people.
    pub namespace: String,
    /// The pod's name, for people.
    pub name: String,
    /// The pod shares the host's process namespace, which is decided when its first process is born.
    pub host_pid: bool,
    /// How it is to be started.
    pub way: Way,
    /// What the pod asks for.
    pub needs: Needs,
    /// What the sandbox shows to its kubelet. A secret: it must not be on a command line.
    pub token: String,
}

/// A sandbox that was started. Dropping it leaves the sandbox alone, for pods outlive their kubelet.
pub trait Handle: Send {
    /// Waits until the sandbox's process is gone and says how it ended. May be dropped and asked again.
    fn exited(&mut self) -> BoxFuture<'_, String>;

    /// The number of its process, while that is known.
    fn id(&self) -> Option<i32>;

    /// Its end is found out by looking again and again, which is worth it only when its connection has ended.
    fn must_be_asked(&self) -> bool {
        false
    }

    /// Kills it, and with it all of the pod.
    fn kill(&mut self);
}

/// Why a sandbox could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the sandbox")]
pub struct LaunchError(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// The key from which a node makes the tokens of its pods. Survives the agent, so that nothing else needs to.
#[derive(Clone)]
pub struct NodeKey(pub [u8; 32]);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeKey")
    }
}

impl NodeKey {
    /// The token of a pod's sandbox: HMAC-SHA256 of its uid.
    pub(crate) fn token(&self, uid: &str) -> String {
        hmac(&self.0, uid.as_bytes())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Whether `token` is that of the pod; takes the same time whichever part of it is wrong.
    pub(crate) fn admits(&self, uid: &str, token: &str) -> bool {
        let right = self.token(uid);
        let differ = right
            .bytes()
            .zip(token.bytes())
            .fold(0, |differ, (a, b)| differ | (a ^ b));
        right.len() == token.len() && differ == 0
    }
}

/// RFC 2104, for keys of at most one block.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let pad = |with: u8| {
        let mut block = [with; 64];
        block.iter_mut().zip(key).for_each(|(pad, key)| *pad ^= key);
        block
    };
    let inner = Sha256::new()
        .chain_update(pad(0x36))
        .chain_update(message)
        .finalize();
    Sha256::new()
        .chain_update(pad(0x5c))
        .chain_update(inner)
        .finalize()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hmac_of_rfc_4231() {
        let hex: String = hmac(b"Jefe", b"what do ya want for nothing?")
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(
            hex,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }

    #[test]
    fn a_share_is_enough_for_what_is_no_more() {
        let needs = |cpu_millis, memory_bytes| Needs {
            cpu_millis,
            memory_bytes,
            ..Needs::default()
        };
        assert!(needs(500, 10).fit_in(&needs(500, 10)));
        assert!(needs(100, 99).fit_in(&needs(500, 0)));
        assert!(!needs(501, 10).fit_in(&needs(500, 10)));
        assert!(!needs(500, 11).fit_in(&needs(500, 10)));
        assert!(!needs(500, 0).fit_in(&needs(500, 10)));
    }

    #[test]
    fn a_token_admits_one_pod() {
        let key = NodeKey([7; 32]);
        let token = key.token("a");
        assert!(key.admits("a", &token));
        assert!(!key.admits("b", &token));
        assert!(!key.admits("a", &token[1..]));
        assert!(!NodeKey([8; 32]).admits("a", &token));
        assert_eq!(format!("{key:?}"), "NodeKey");
    }
}
