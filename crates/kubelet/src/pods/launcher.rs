//! The interface between the kubelet and the launchers, which start sandboxes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ContainerImage;
use pod_protocol::connection::LogByteStream;
use pod_protocol::{LogQuery, PodState, Problem};
use sha2::{Digest, Sha256};

/// Starts sandboxes: as children of the agent, or as job steps.
pub trait Launcher: Send + Sync {
    /// Starts a sandbox and returns at once. The sandbox connects to the kubelet when it runs.
    fn launch(
        &self,
        request: LaunchRequest,
    ) -> BoxFuture<'_, Result<Box<dyn SandboxHandle>, LaunchError>>;

    /// Finds the running sandbox of a pod: an earlier kubelet has started it, and it may not have connected to this one yet.
    fn find(&self, _uid: &str) -> Option<Box<dyn SandboxHandle>> {
        None
    }

    /// The last checkpoint of a pod whose sandbox has exited; `None` if there is none.
    fn checkpoint(&self, _uid: &str) -> BoxFuture<'_, Option<PodState>> {
        Box::pin(std::future::ready(None))
    }

    /// Reads a log of a pod whose sandbox has exited; `None` if its log files are gone.
    fn logs(
        &self,
        _uid: &str,
        _query: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogByteStream, Problem>>> {
        Box::pin(std::future::ready(None))
    }

    /// Removes a directory that containers have written to. If sandboxes have several user ids, files of all of these must
    /// be removed.
    fn remove(&self, dir: PathBuf) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(tokio::fs::remove_dir_all(dir))
    }

    /// The images in the local store, for the Node's status.
    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        Box::pin(std::future::ready(Vec::new()))
    }
}

/// The annotation with which a pod selects its launcher.
pub const LAUNCHER_ANNOTATION: &str = "coracle.dev/launcher";

/// How a sandbox is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LauncherKind {
    /// As a child of the agent.
    #[default]
    Fork,
    /// As a job step, to which Slurm allocates the pod's resources until its sandbox exits.
    Step,
}

impl LauncherKind {
    /// Parses a value of [`LAUNCHER_ANNOTATION`].
    pub(crate) fn parse(value: &str) -> Option<Self> {
        match value {
            "fork" => Some(Self::Fork),
            "step" => Some(Self::Step),
            _ => None,
        }
    }
}

/// The resources of a pod: the sum over its containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodResources {
    /// Requested CPUs, in thousandths.
    pub cpu_millis: u64,
    /// Memory in bytes: the limit or, without one, the request.
    pub memory_bytes: u64,
    /// Extended resources by name, such as `nvidia.com/gpu`.
    pub extended: BTreeMap<String, u64>,
}

impl PodResources {
    /// Whether these resources fit in `allocated`.
    pub(crate) fn fit_in(&self, allocated: &Self) -> bool {
        // A pod without a memory request may use all memory.
        let memory = allocated.memory_bytes == 0
            || (self.memory_bytes > 0 && self.memory_bytes <= allocated.memory_bytes);
        memory && self.cpu_millis <= allocated.cpu_millis && self.extended == allocated.extended
    }
}

/// The parameters of a new sandbox. It receives everything else over its connection.
#[derive(Clone, Debug)]
pub struct LaunchRequest {
    /// The pod's uid.
    pub uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod uses the host's PID namespace. The sandbox needs this before its first fork.
    pub host_pid: bool,
    /// The launcher to use.
    pub launcher: LauncherKind,
    /// The pod's resources.
    pub resources: PodResources,
    /// Authenticates the sandbox to the kubelet. A secret: it must not be on a command line.
    pub token: String,
}

/// A running sandbox. Dropping the handle does not end the sandbox: pods outlive their kubelet.
pub trait SandboxHandle: Send {
    /// Waits until the sandbox's process has exited, and returns how. The future may be dropped and requested again.
    fn exited(&mut self) -> BoxFuture<'_, String>;

    /// Its process id, while that is known.
    fn id(&self) -> Option<i32>;

    /// Whether [`exited`](Self::exited) polls the process. Callers then avoid it while the sandbox is connected.
    fn exit_is_polled(&self) -> bool {
        false
    }

    /// Kills the sandbox, and so all containers of the pod.
    fn kill(&mut self);
}

/// Why a sandbox was not started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the sandbox")]
pub struct LaunchError(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// The key from which a node derives the tokens of its sandboxes. It outlives the agent.
#[derive(Clone)]
pub struct NodeKey(pub [u8; 32]);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeKey")
    }
}

impl NodeKey {
    /// The token of a pod's sandbox: HMAC-SHA256 of the pod's uid.
    pub(crate) fn token(&self, uid: &str) -> String {
        hmac(&self.0, uid.as_bytes())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Whether `token` is that of the pod, compared in constant time.
    pub(crate) fn admits(&self, uid: &str, token: &str) -> bool {
        let expected = self.token(uid);
        let differ = expected
            .bytes()
            .zip(token.bytes())
            .fold(0, |differ, (a, b)| differ | (a ^ b));
        expected.len() == token.len() && differ == 0
    }
}

/// RFC 2104, for keys of at most one block.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let pad = |byte: u8| {
        let mut block = [byte; 64];
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
    fn resources_fit_if_none_is_larger() {
        let resources = |cpu_millis, memory_bytes| PodResources {
            cpu_millis,
            memory_bytes,
            ..PodResources::default()
        };
        assert!(resources(500, 10).fit_in(&resources(500, 10)));
        assert!(resources(100, 99).fit_in(&resources(500, 0)));
        assert!(!resources(501, 10).fit_in(&resources(500, 10)));
        assert!(!resources(500, 11).fit_in(&resources(500, 10)));
        assert!(!resources(500, 0).fit_in(&resources(500, 10)));
    }

    #[test]
    fn token_admits_only_its_pod() {
        let key = NodeKey([7; 32]);
        let token = key.token("a");
        assert!(key.admits("a", &token));
        assert!(!key.admits("b", &token));
        assert!(!key.admits("a", &token[1..]));
        assert!(!NodeKey([8; 32]).admits("a", &token));
        assert_eq!(format!("{key:?}"), "NodeKey");
    }
}
