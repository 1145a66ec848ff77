//! What the leader of a cluster and the agents of its nodes tell each other.
//!
//! ```text
//!   leader ──(srun's standard input)──► agent     Handover: where I am, how to know me, a token
//!   leader ◄──(TCP, TLS)─────────────── agent     Hello: the token, my public keys
//!   leader ───────────────────────────► agent     Welcome: your certificates, your Node
//!   leader ◄──────────────────────────► agent     … the life line: Registered, End, Gone …
//! ```
//!
//! A token admits each node once. An agent that comes back after a crash shows the certificate that it
//! was given. When the connection ends without a word, the other side has died or the network is cut.
//! Every message is one line of JSON.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::{SinkExt, StreamExt};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_util::codec::{Framed, LinesCodec};

/// The name in the leader's certificate; agents know addresses only.
pub const LEADER_NAME: &str = "leader.coracle";
/// The variable that marks the processes of a cluster's workload.
pub const MARK: &str = "CORACLE_CLUSTER";
/// No message is longer than this.
const MAX_LINE: usize = 256 * 1024;
/// Clocks that differ by more make certificates invalid and leases expire.
const CLOCK_LIMIT: Duration = control_plane::pki::CLOCK_TOLERANCE;

/// A host that is silent for so long is lost.
const SILENCE: Duration = Duration::from_secs(15);

/// Both ends must be the same program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What an agent gets to know when it is started.
#[derive(Clone, Serialize, Deserialize)]
pub struct Handover {
    /// The leader's version.
    pub version: String,
    /// Where the leader may be reached.
    pub leaders: Vec<SocketAddr>,
    /// Signs the leader's certificate.
    pub ca_pem: String,
    /// Admits each node once.
    pub token: String,
    /// The leader's clock, in seconds since 1970.
    pub time: u64,
    /// The cluster's secret, from which a node knows its own directory and key: the same for every agent that it ever has.
    pub secret: String,
}

/// The first word of an agent.
#[derive(Serialize, Deserialize)]
pub struct Hello {
    /// The agent's version.
    pub version: String,
    /// The node, by Slurm's name for it.
    pub node: String,
    /// The token, or nothing if the agent has shown its certificate.
    pub token: Option<String>,
    /// The key with which it will log in to the API server and, later, to the leader.
    pub client_key_pem: String,
    /// The key of its kubelet's server.
    pub server_key_pem: String,
    /// The addresses of its host; the first is the one that reaches the leader.
    pub addresses: Vec<IpAddr>,
}

/// What an admitted agent gets: everything that its kubelet needs.
#[derive(Clone, Serialize, Deserialize)]
pub struct Welcome {
    /// Logs in to the API server as this node.
    pub client_cert_pem: String,
    /// Logs in to the leader as this node.
    pub join_cert_pem: String,
    /// Shows who the kubelet is.
    pub server_cert_pem: String,
    /// Signs the API server's certificate.
    pub cluster_ca_pem: String,
    /// Signs the certificate that the API server shows to kubelets.
    pub kubelet_client_ca_pem: String,
    /// The API server's port, on the leader's host.
    pub api_port: u16,
    /// CPUs of the node that belong to the job.
    pub cpus: u32,
    /// Memory of the node that belongs to the job, if Slurm counts it.
    pub memory_bytes: Option<u64>,
    /// Other resources, by their Kubernetes names.
    pub extended: BTreeMap<String, u64>,
    /// Labels of the Node.
    pub labels: BTreeMap<String, String>,
    /// The version of Kubernetes.
    pub kubernetes_version: String,
    /// The job, and the step whose tasks wait for the leader, if any.
    pub job: (u32, Option<u32>),
    /// What processes of the cluster carry in their environment, as the value of [`MARK`].
    pub mark: String,
    /// The addresses of this node's pods.
    pub pod_cidr: String,
    /// How long pods have to end when the cluster does.
    pub pods_grace: Duration,
    /// Pods are steps of the job unless they say otherwise.
    pub pods_as_steps: bool,
}

/// What the leader tells an agent.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToNode {
    /// You belong to the cluster.
    Welcome(Box<Welcome>),
    /// You don't.
    Refused(String),
    /// The cluster ends.
    End,
    /// Another agent of this node is here; end without a word.
    Replaced,
}

/// What an agent tells the leader.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToLeader {
    /// First of all.
    Hello(Box<Hello>),
    /// The Node is there and Ready.
    Registered,
    /// Slurm told me to end.
    ToldToEnd,
    /// I can't go on.
    Failed(String),
    /// Nothing of me is left.
    Gone,
}

/// A connection that carries messages.
pub struct Wire<S>(Framed<S, LinesCodec>);

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    /// Speaks over `stream`.
    pub fn new(stream: S) -> Self {
        Self(Framed::new(
            stream,
            LinesCodec::new_with_max_length(MAX_LINE),
        ))
    }

    /// Sends a message.
    pub async fn send(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        self.0.send(serde_json::to_string(message)?).await?;
        Ok(())
    }

    /// The next message; `None` when the other side has closed the connection.
    pub async fn receive<T: DeserializeOwned>(&mut self) -> anyhow::Result<Option<T>> {
        match self.0.next().await {
            Some(line) => Ok(Some(serde_json::from_str(&line?)?)),
            None => Ok(None),
        }
    }
}

/// Makes a connection end when the other host has been silent for a while: one that lost its power
/// doesn't say goodbye.
pub fn notice_silence(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE / 3)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE / 3)?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    sockopt::set_tcp_user_timeout(
        stream,
        u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX),
    )?;
    Ok(())
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A problem if two clocks are too far apart to work with.
pub fn clock_problem(leader: u64, node: u64) -> Option<String> {
    let apart = Duration::from_secs(leader.abs_diff(node));
    if apart <= CLOCK_LIMIT {
        return None;
    }
    let direction = if node < leader { "behind" } else { "ahead of" };
    Some(format!(
        "its clock is {} s {direction} the leader's; certificates can't be valid on both",
        apart.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_differ_a_little() {
        assert_eq!(clock_problem(100_000, 100_060), None);
        let behind = clock_problem(100_000, 90_000).unwrap();
        assert!(behind.contains("10000 s behind"), "{behind}");
        assert!(clock_problem(90_000, 100_000).unwrap().contains("ahead"));
    }

    #[tokio::test]
    async fn a_line_without_end_is_refused() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let mut wire = Wire::new(ours);
        tokio::spawn(async move {
            let garbage = vec![b'x'; MAX_LINE + 2];
            let _ = tokio::io::AsyncWriteExt::write_all(&mut theirs, &garbage).await;
        });
        assert!(wire.receive::<ToLeader>().await.is_err());
    }
}
