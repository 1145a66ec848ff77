//! The messages between leader and agents. Each is one line of JSON.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::{SinkExt, StreamExt};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_util::codec::{Framed, LinesCodec};

/// The name in the leader's certificate; agents know addresses only.
pub const LEADER_NAME: &str = "leader.coracle";
/// Limit on the length of a message.
const MAX_MESSAGE_LINE: usize = 256 * 1024;
/// Larger clock differences make certificates invalid and leases expire.
const MAX_CLOCK_DIFFERENCE: Duration = control_plane::pki::CLOCK_TOLERANCE;

/// A peer that acknowledges nothing for this long is lost.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(15);

/// The version of this program. Leader and agents must have the same.
pub const COMPATIBLE_VERSION: &str = env!("CARGO_PKG_VERSION");

/// The configuration for enrolment, which an agent reads from its standard input.
#[derive(Clone, Serialize, Deserialize)]
pub struct JoinConfig {
    /// The leader's version.
    pub version: String,
    /// Addresses of the leader's enrolment listener.
    pub leader_addresses: Vec<SocketAddr>,
    /// The CA of the leader's certificate.
    pub ca_pem: String,
    /// Admits each node once.
    pub token: String,
    /// The leader's clock, as Unix time.
    pub time: u64,
    /// The cluster's secret. A node derives its directory and key from it, so that every agent of the node finds the same.
    pub secret: String,
}

/// The first message of an agent.
#[derive(Serialize, Deserialize)]
pub struct JoinRequest {
    /// The agent's version.
    pub version: String,
    /// The node, by Slurm's name for it.
    pub node: String,
    /// The token; `None` if the agent has authenticated by its certificate.
    pub token: Option<String>,
    /// The public key of its client certificates, for the API server and the leader.
    pub client_key_pem: String,
    /// The public key of its kubelet's server certificate.
    pub server_key_pem: String,
    /// The addresses of its host; the first is the one that reaches the leader.
    pub addresses: Vec<IpAddr>,
}

/// Everything that the kubelet of an enrolled node needs.
#[derive(Clone, Serialize, Deserialize)]
pub struct JoinResponse {
    /// Client certificate for the API server.
    pub client_cert_pem: String,
    /// Client certificate for the leader.
    pub join_cert_pem: String,
    /// Server certificate of the kubelet.
    pub server_cert_pem: String,
    /// The CA of the API server's certificate.
    pub cluster_ca_pem: String,
    /// The CA of the certificate with which the API server authenticates to kubelets.
    pub kubelet_client_ca_pem: String,
    /// The API server's port, on the leader's host.
    pub api_port: u16,
    /// CPUs of the node that are allocated to the job.
    pub cpus: u32,
    /// Memory of the node that is allocated to the job, if Slurm counts it.
    pub memory_bytes: Option<u64>,
    /// Other resources, by their Kubernetes names.
    pub extended: BTreeMap<String, u64>,
    /// Labels of the Node.
    pub labels: BTreeMap<String, String>,
    /// The version of Kubernetes.
    pub kubernetes_version: String,
    /// The job, and the step whose tasks wait for the leader, if any.
    pub job: (u32, Option<u32>),
    /// The cluster's mark, the value of [`crate::WORKLOAD_MARK`].
    pub mark: String,
    /// The node's pod range.
    pub pod_cidr: String,
    /// The longest grace period of pods when the cluster ends.
    pub pods_grace: Duration,
    /// Launch pods as Slurm steps, unless their annotation chooses otherwise.
    pub pods_as_steps: bool,
    /// Paths of hostPath volumes that lead to other directories.
    pub host_path_mappings: Vec<HostPathMapping>,
}

/// A directory that pods find under another path in hostPath volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPathMapping {
    /// The path in hostPath volumes.
    pub path: PathBuf,
    /// The directory on each node.
    pub dir: PathBuf,
    /// A node that has `path` uses its own.
    pub only_if_missing: bool,
}

/// Messages from the leader to an agent.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaderMessage {
    /// The agent is enrolled.
    Welcome(Box<JoinResponse>),
    /// The agent is refused, for this reason.
    Refused(String),
    /// The cluster ends.
    End,
    /// Another agent of this node is enrolled; the receiver ends and leaves the node to it.
    NodeTaken,
}

/// Messages from an agent to the leader.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentMessage {
    /// The first message.
    Hello(Box<JoinRequest>),
    /// The Node is registered and Ready.
    Registered,
    /// Slurm has signalled the agent: the job ends.
    JobEnding,
    /// The agent cannot continue.
    Failed(String),
    /// The agent has stopped its pods and removed its files.
    Left,
}

/// A connection that carries messages as lines of JSON.
pub struct MessageStream<S>(Framed<S, LinesCodec>);

impl<S: AsyncRead + AsyncWrite + Unpin> MessageStream<S> {
    /// Sends and receives messages on `stream`.
    pub fn new(stream: S) -> Self {
        Self(Framed::new(
            stream,
            LinesCodec::new_with_max_length(MAX_MESSAGE_LINE),
        ))
    }

    /// Sends a message as one line.
    pub async fn send(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        self.0.send(serde_json::to_string(message)?).await?;
        Ok(())
    }

    /// Receives the next message; `None` if the peer has closed the connection.
    pub async fn receive<T: DeserializeOwned>(&mut self) -> anyhow::Result<Option<T>> {
        match self.0.next().await {
            Some(line) => Ok(Some(serde_json::from_str(&line?)?)),
            None => Ok(None),
        }
    }
}

/// Makes the connection fail when the peer's host is silent: a host that lost its power sends no FIN.
pub fn enable_keepalive(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_TIMEOUT / 3)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_TIMEOUT / 3)?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    sockopt::set_tcp_user_timeout(
        stream,
        u32::try_from(KEEPALIVE_TIMEOUT.as_millis()).unwrap_or(u32::MAX),
    )?;
    Ok(())
}

/// The current Unix time.
pub fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// An error message if two clocks are too far apart for certificates and leases.
pub fn clock_problem(leader: u64, node: u64) -> Option<String> {
    let difference = Duration::from_secs(leader.abs_diff(node));
    if difference <= MAX_CLOCK_DIFFERENCE {
        return None;
    }
    let direction = if node < leader { "behind" } else { "ahead of" };
    Some(format!(
        "its clock is {} s {direction} the leader's; certificates cannot be valid on both",
        difference.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_differ_within_tolerance() {
        assert_eq!(clock_problem(100_000, 100_060), None);
        let behind = clock_problem(100_000, 90_000).unwrap();
        assert!(behind.contains("10000 s behind"), "{behind}");
        assert!(clock_problem(90_000, 100_000).unwrap().contains("ahead"));
    }

    #[tokio::test]
    async fn rejects_overlong_message() {
        let (client, mut server) = tokio::io::duplex(1 << 20);
        let mut stream = MessageStream::new(client);
        tokio::spawn(async move {
            let garbage = vec![b'x'; MAX_MESSAGE_LINE + 2];
            let _ = tokio::io::AsyncWriteExt::write_all(&mut server, &garbage).await;
        });
        assert!(stream.receive::<AgentMessage>().await.is_err());
    }
}
