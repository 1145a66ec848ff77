//! The agent: enrols with the leader, runs the kubelet, and shuts down in order.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cluster::WORKLOAD_MARK;
use cluster::enrolment::{
    AgentMessage, COMPATIBLE_VERSION, Enrolled, EnrolmentRefused, JoinConfig, LeaderConnection,
    LeaderMessage, NodeIdentity, NodeTaken, SavedIdentity, enrol, is_leader_gone, is_retryable,
};
use control_plane::pki::{KUBELET_CLIENT, TlsIdentity};
use kubelet::{
    HostDirs, Kubelet, LauncherKind, NodeCapacity, NodeConfig, NodeProcesses, PodManager,
};
use kubelet_api::{AccessPolicy, ServerIdentity};
use pod_protocol::connection::{KubeletEndpoint, TransportListener};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use volumes::NodePath;

use super::image_gc;
use crate::guard::EXIT_HANDED_OVER;
use crate::launch::{NodeLauncher, one_per_family};
use crate::node_dir::{self, NodeDir};
use crate::node_hub::NodeHub;
use crate::settings;

/// Upstream's default.
const MAX_PODS: u32 = 110;
/// Upstream's port of kubelets, which clients of `nodes/NAME:10250/proxy` expect.
const KUBELET_PORT: u16 = 10250;
/// How long the agent waits for the leader's `End` message after a signal from Slurm.
const END_MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// After this many refused connections in a row, the leader is considered dead.
const MAX_REFUSED_CONNECTIONS: u32 = 5;
/// Attempts to enrol for the first time.
const MAX_JOIN_ATTEMPTS: u32 = 4;
const RECONNECT_INTERVAL: Duration = Duration::from_millis(500);

/// The reason why an agent ends.
enum AgentEnd {
    /// The leader sent `End`.
    ClusterEnds,
    /// The leader died or refused the agent, or Slurm ends the job.
    LeaderLost {
        /// The leader's port refuses connections: the leader died.
        dead: bool,
    },
    /// Another agent has taken over this node.
    Replaced,
    /// The kubelet failed.
    Failed(anyhow::Error),
}

/// Runs this node's agent until the leader or Slurm ends it, or it fails.
///
/// `pods_cgroup` is the parent cgroup of the pods' cgroups, if there is one.
pub async fn run(
    join_config: JoinConfig,
    saved: SavedIdentity,
    node_dir: NodeDir,
    pods_cgroup: Option<PathBuf>,
) -> anyhow::Result<ExitCode> {
    let mut signals = JobSignals::listen()?;
    let image_gc_policy = settings::image_gc::from_environment()?;
    let node = super::node_name();
    let Enrolled {
        connection,
        identity,
        addresses,
    } = match join(&join_config, &node, &saved, &mut signals).await {
        Ok(enrolled) => enrolled,
        Err(end) => return exit_without_enrolment(end, &saved).await,
    };
    let mut connection = Some(connection);
    saved.save(&identity)?;
    let (mut parts, registered) =
        AgentParts::start(&node, &identity, addresses, &node_dir, pods_cgroup).await?;
    let end = tokio::select! {
        () = image_gc::run(node_dir.dir.clone(), image_gc_policy) => AgentEnd::Failed(anyhow::anyhow!("image garbage collection ended")),
        end = keep_connection(&mut connection, &join_config, &node, &saved, registered, &mut signals) => end,
        ended = &mut parts.kubelet => AgentEnd::Failed(match ended {
            Ok(Ok(())) => anyhow::anyhow!("the kubelet ended unexpectedly"),
            Ok(Err(error)) => error.into(),
            Err(panic) => panic.into(),
        }),
    };
    parts.stop(&end).await;
    exit_after_end(end, &mut connection, &identity).await
}

/// The running parts of an agent.
struct AgentParts {
    kubelet: JoinHandle<Result<(), kubelet::KubeletError>>,
    server: JoinHandle<Result<(), kubelet_api::ApiError>>,
    hub: Arc<NodeHub>,
    hub_supervisor: AbortHandle,
    /// Stops the kubelet, which then deletes the Node.
    stop_kubelet: CancellationToken,
    /// Stops the server.
    stop_server: CancellationToken,
}

impl AgentParts {
    /// Starts all parts. The receiver gets a message when the Node is registered.
    async fn start(
        node: &str,
        identity: &NodeIdentity,
        addresses: Vec<IpAddr>,
        node_dir: &NodeDir,
        pods_cgroup: Option<PathBuf>,
    ) -> anyhow::Result<(Self, oneshot::Receiver<()>)> {
        let listener = listen().await.context("cannot open the kubelet's port")?;
        let port = listener.local_addr()?.port();
        let config = node_config(node, identity, addresses, port, node_dir)?;
        let hub = node_hub(identity, node_dir);
        let launcher = node_launcher(&config, identity, node_dir, &hub, pods_cgroup)?;
        let client = api_client(identity).await?;
        let pods = Arc::new(PodManager::default());
        pods.set_agent_log(Box::new(crate::log::memory_log));
        let (stop_kubelet, stop_server) = (CancellationToken::new(), CancellationToken::new());
        let webhook_auth = kubelet::WebhookAuth::new(client.clone(), node.to_owned());
        let server = tokio::spawn(kubelet_api::serve(
            listener,
            server_identity(identity),
            AccessPolicy::for_common_names([KUBELET_CLIENT.to_owned()])
                .with_delegated_auth(Arc::new(webhook_auth)),
            pods.clone(),
            config.stream_idle_timeout,
            stop_server.clone(),
        ));
        let sandbox_socket = node_dir::kubelet_socket(&node_dir.dir);
        let sandbox_listener = TransportListener::bind_unix(&sandbox_socket)
            .with_context(|| format!("cannot listen on {}", sandbox_socket.display()))?;
        let network = kubelet::NetworkStateSender::default();
        let states = network.subscribe();
        let (registered_sender, registered) = oneshot::channel();
        let (ending, pods_grace) = (stop_kubelet.clone(), identity.response.pods_grace);
        let parts = Kubelet {
            client,
            config,
            launcher: launcher.clone(),
            listener: sandbox_listener,
            network,
            pod_manager: pods,
        };
        let kubelet = tokio::spawn(kubelet::run(parts, registered_sender, async move {
            ending.cancelled().await;
            pods_grace
        }));
        // Runs while the node registers. A failure affects only the pods that need it, so it is not fatal here.
        let (hub_running, snapshotter) = tokio::join!(hub.ensure_running(), launcher.snapshotter());
        for error in [hub_running.err(), snapshotter.err()].into_iter().flatten() {
            tracing::warn!(error = format!("{error:#}"), "pods cannot run on this node");
        }
        let hub_supervisor = tokio::spawn({
            let hub = hub.clone();
            async move { tokio::join!(hub.supervise(), hub.send_states(states)) }
        });
        let parts = Self {
            kubelet,
            server,
            hub,
            hub_supervisor: hub_supervisor.abort_handle(),
            stop_kubelet,
            stop_server,
        };
        Ok((parts, registered))
    }

    /// Stops all parts.
    async fn stop(self, end: &AgentEnd) {
        // The next agent adopts the Node and its pods.
        let has_successor = matches!(end, AgentEnd::Replaced | AgentEnd::Failed(_));
        if has_successor {
            self.kubelet.abort();
        } else {
            self.stop_kubelet.cancel();
            let _ = self.kubelet.await;
        }
        // After the pods: clients that follow a log get what the pods print while they terminate.
        self.stop_server.cancel();
        let _ = self.server.await;
        self.hub_supervisor.abort();
        if !has_successor {
            self.hub.shut_down().await;
        }
    }
}

/// Tells the leader about the end of the agent, or cleans up after the leader.
async fn exit_after_end(
    end: AgentEnd,
    connection: &mut Option<LeaderConnection>,
    identity: &NodeIdentity,
) -> anyhow::Result<ExitCode> {
    match end {
        AgentEnd::ClusterEnds => send(connection, &AgentMessage::Left).await,
        AgentEnd::LeaderLost { dead: true } => clean_up_after_leader(identity).await,
        AgentEnd::LeaderLost { dead: false } => {}
        AgentEnd::Replaced => return Ok(ExitCode::from(EXIT_HANDED_OVER)),
        AgentEnd::Failed(error) => {
            let problem = format!("{error:#}");
            send(connection, &AgentMessage::Failed(problem)).await;
            return Err(error);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A client of the API server, with the certificate of this node.
async fn api_client(identity: &NodeIdentity) -> anyhow::Result<kube::Client> {
    let api = SocketAddr::new(identity.leader, identity.response.api_port);
    let client_identity = TlsIdentity {
        cert_pem: identity.response.client_cert_pem.clone(),
        key_pem: identity.client_key_pem.clone(),
    };
    cluster::client::connect(api, &identity.response.cluster_ca_pem, &client_identity).await
}

/// Binds [`KUBELET_PORT`], or any free port if another kubelet on this host uses it.
async fn listen() -> std::io::Result<TcpListener> {
    match TcpListener::bind(("0.0.0.0", KUBELET_PORT)).await {
        Ok(listener) => Ok(listener),
        Err(_) => TcpListener::bind("0.0.0.0:0").await,
    }
}

/// Enrols with the leader: for the first time, or with the identity of an agent that died.
async fn join(
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
    signals: &mut JobSignals,
) -> Result<Enrolled, AgentEnd> {
    let joining = async {
        match saved.load() {
            None => first_join(join_config, node).await,
            Some(_) => reconnect(join_config, node, saved).await,
        }
    };
    let mut joining = std::pin::pin!(joining);
    loop {
        let deadline = signals.deadline;
        tokio::select! {
            joined = &mut joining => return joined,
            () = signals.recv() => signals.record()?,
            () = wait_until(deadline) => return Err(AgentEnd::LeaderLost { dead: false }),
        }
    }
}

/// Enrols for the first time. Retries, because the leader's listener may be full of unauthenticated connections and the network slow.
async fn first_join(join_config: &JoinConfig, node: &str) -> Result<Enrolled, AgentEnd> {
    let mut attempt = 1;
    loop {
        match enrol(join_config, node, None).await {
            Ok(enrolled) => return Ok(enrolled),
            Err(error) if error.is::<NodeTaken>() => return Err(AgentEnd::Replaced),
            Err(error) if is_retryable(&error) && attempt < MAX_JOIN_ATTEMPTS => {
                tracing::warn!(
                    node,
                    error = format!("{error:#}"),
                    "cannot reach the leader yet"
                );
                attempt += 1;
                tokio::time::sleep(RECONNECT_INTERVAL).await;
            }
            Err(error) => return Err(AgentEnd::Failed(error)),
        }
    }
}

/// Ends an agent that could not enrol.
async fn exit_without_enrolment(end: AgentEnd, saved: &SavedIdentity) -> anyhow::Result<ExitCode> {
    match end {
        AgentEnd::Replaced => return Ok(ExitCode::from(EXIT_HANDED_OVER)),
        AgentEnd::Failed(error) => return Err(error),
        AgentEnd::LeaderLost { dead: true } => {
            if let Some(identity) = saved.load() {
                clean_up_after_leader(&identity).await;
            }
        }
        AgentEnd::LeaderLost { dead: false } | AgentEnd::ClusterEnds => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Keeps the connection to the leader, and reconnects, until the agent is to end.
async fn keep_connection(
    connection: &mut Option<LeaderConnection>,
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
    registered: oneshot::Receiver<()>,
    signals: &mut JobSignals,
) -> AgentEnd {
    let mut is_registered = false;
    // Fused, because a oneshot receiver must not be polled after it has completed.
    let mut registered = std::pin::pin!(futures::FutureExt::fuse(registered));
    if signals.deadline.is_some() {
        send(connection, &AgentMessage::JobEnding).await;
    }
    loop {
        let deadline = signals.deadline;
        tokio::select! {
            event = next_connection_event(connection, join_config, node, saved) => match event {
                Ok(ConnectionEvent::Message(LeaderMessage::End)) => return AgentEnd::ClusterEnds,
                Ok(ConnectionEvent::Message(LeaderMessage::NodeTaken)) => return AgentEnd::Replaced,
                Ok(ConnectionEvent::Message(LeaderMessage::Welcome(_) | LeaderMessage::Refused(_))) => {}
                Ok(ConnectionEvent::Lost) => tracing::warn!(node, "lost the connection to the leader"),
                Ok(ConnectionEvent::Restored) => {
                    tracing::info!(node, "connected to the leader again");
                    if is_registered {
                        send(connection, &AgentMessage::Registered).await;
                    }
                    if signals.deadline.is_some() {
                        send(connection, &AgentMessage::JobEnding).await;
                    }
                }
                Err(end) => return end,
            },
            Ok(()) = &mut registered => {
                is_registered = true;
                send(connection, &AgentMessage::Registered).await;
            }
            () = signals.recv() => {
                if let Err(end) = signals.record() {
                    return end;
                }
                // Slurm ends the job. The leader may not know yet: Slurm does not signal a batch script.
                send(connection, &AgentMessage::JobEnding).await;
            }
            () = wait_until(deadline) => return AgentEnd::LeaderLost { dead: false },
        }
    }
}

/// Events of the connection to the leader.
enum ConnectionEvent {
    /// The leader sent a message.
    Message(LeaderMessage),
    /// The connection was lost.
    Lost,
    /// The agent reconnected.
    Restored,
}

/// Waits for the leader's next message or, without a connection, reconnects.
async fn next_connection_event(
    connection: &mut Option<LeaderConnection>,
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
) -> Result<ConnectionEvent, AgentEnd> {
    if let Some(open) = connection {
        return Ok(match open.receive().await {
            Ok(Some(message)) => ConnectionEvent::Message(message),
            Ok(None) | Err(_) => {
                *connection = None;
                ConnectionEvent::Lost
            }
        });
    }
    *connection = Some(reconnect(join_config, node, saved).await?.connection);
    Ok(ConnectionEvent::Restored)
}

/// Sends a message to the leader if there is a connection. Ignores errors: the next receive reports them.
async fn send(connection: &mut Option<LeaderConnection>, message: &AgentMessage) {
    if let Some(connection) = connection {
        let _ = connection.send(message).await;
    }
}

/// The signals with which Slurm, or a user, ends a job.
struct JobSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    guard: Option<rustix::process::Pid>,
    /// When to end without an `End` message from the leader.
    deadline: Option<Instant>,
}

impl JobSignals {
    /// Installs handlers, so that these signals no longer terminate the process.
    fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            guard: rustix::process::getppid(),
            deadline: None,
        })
    }

    /// Records a signal and starts the leader's grace period. Fails if the signal was not Slurm's but the parent death signal.
    fn record(&mut self) -> Result<(), AgentEnd> {
        if rustix::process::getppid() != self.guard {
            // The guard was killed. A new agent, with a new guard, takes over.
            return Err(AgentEnd::Failed(anyhow::anyhow!(
                "the agent's guard was killed"
            )));
        }
        self.deadline
            .get_or_insert_with(|| Instant::now() + END_MESSAGE_TIMEOUT);
        Ok(())
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Reconnects to the leader, without a time-out: pods continue to run while the network is down, and Slurm ends the job. Fails if the
/// leader is dead or refuses the agent.
async fn reconnect(
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
) -> Result<Enrolled, AgentEnd> {
    let mut refused = 0;
    loop {
        let error = match enrol(join_config, node, saved.load()).await {
            Ok(enrolled) => return Ok(enrolled),
            Err(error) if error.is::<NodeTaken>() => return Err(AgentEnd::Replaced),
            Err(error) if error.is::<EnrolmentRefused>() => {
                tracing::warn!(node, %error, "the leader refused this agent");
                return Err(AgentEnd::LeaderLost { dead: false });
            }
            Err(error) => error,
        };
        tracing::debug!(error = format!("{error:#}"), "cannot reach the leader");
        refused = match is_leader_gone(&error) {
            true => refused + 1,
            false => 0,
        };
        if refused == MAX_REFUSED_CONNECTIONS {
            return Err(AgentEnd::LeaderLost { dead: true });
        }
        tokio::time::sleep(RECONNECT_INTERVAL).await;
    }
}

/// Cleans up for a leader that was killed together with its guard. This agent's guard cleans up the node.
async fn clean_up_after_leader(identity: &NodeIdentity) {
    let mark = format!("{WORKLOAD_MARK}={}", identity.response.mark);
    if let Err(error) = linux::process::kill_marked(&mark) {
        tracing::warn!(%error, "cannot kill the cluster's remaining processes");
    }
    if let (job, Some(step)) = identity.response.job {
        crate::waiting_tasks::end_step(job, step).await;
    }
}

fn server_identity(identity: &NodeIdentity) -> ServerIdentity {
    ServerIdentity {
        cert_chain_pem: identity.response.server_cert_pem.clone(),
        key_pem: identity.server_key_pem.clone(),
        client_ca_pem: identity.response.kubelet_client_ca_pem.clone(),
    }
}

fn node_launcher(
    config: &NodeConfig,
    identity: &NodeIdentity,
    node_dir: &NodeDir,
    hub: &Arc<NodeHub>,
    pods_cgroup: Option<PathBuf>,
) -> anyhow::Result<Arc<NodeLauncher>> {
    Ok(Arc::new(NodeLauncher {
        kubelet: KubeletEndpoint::Unix(node_dir::kubelet_socket(&node_dir.dir)),
        node_dir: node_dir.clone(),
        hub: Arc::clone(hub),
        store: images::ImageStore::default_path()
            .context("no directory for images: neither XDG_DATA_HOME nor HOME is set")?,
        pods_cgroup,
        images: Arc::default(),
        snapshotter: Arc::default(),
        host_ips: one_per_family(&config.internal_ips),
        job_sandbox: None,
        job: identity.response.job.0,
        node: config.name.clone(),
        open_files: linux::descriptors::raise_limit(None)?,
    }))
}

fn node_hub(identity: &NodeIdentity, node_dir: &NodeDir) -> Arc<NodeHub> {
    Arc::new(NodeHub::new(&node_dir.dir, &identity.response.pod_cidr))
}

fn node_config(
    node: &str,
    identity: &NodeIdentity,
    addresses: Vec<IpAddr>,
    kubelet_port: u16,
    node_dir: &NodeDir,
) -> anyhow::Result<NodeConfig> {
    let response = &identity.response;
    let scratch_dir = node_dir::scratch_dir();
    let scratch = rustix::fs::statvfs(&scratch_dir).or_else(|_| rustix::fs::statvfs("/tmp"))?;
    Ok(NodeConfig {
        name: node.to_owned(),
        internal_ips: addresses,
        hostname: node_dir::hostname(),
        kubelet_port,
        capacity: NodeCapacity {
            cpus: response.cpus,
            memory_bytes: match response.memory_bytes {
                Some(bytes) => bytes,
                // Slurm does not manage memory here, so the job may use all of the host's.
                None => total_memory(),
            },
            ephemeral_storage_bytes: scratch.f_bavail * scratch.f_frsize,
            pods: MAX_PODS,
            extended: response.extended.clone(),
        },
        labels: response.labels.clone(),
        annotations: std::collections::BTreeMap::new(),
        kubelet_version: format!(
            "{}+coracle-{}",
            response.kubernetes_version, COMPATIBLE_VERSION
        ),
        host_dirs: Some(HostDirs {
            scratch: scratch_dir,
            local_volumes: node_dir::local_volumes(&node_dir.dir),
        }),
        node_key: node_dir.key.clone(),
        launcher: match response.pods_as_steps {
            true => LauncherKind::Step,
            false => LauncherKind::Fork,
        },
        pod_cidrs: vec![response.pod_cidr.clone()],
        cluster_dns: Vec::new(),
        cluster_domain: "cluster.local".to_owned(),
        stream_idle_timeout: settings::stream_idle::from_environment()?,
        processes: slurm::JobProcessMarkers::of_current_job().map(|job| NodeProcesses {
            environment: job.env_variable,
            cgroup: job.cgroup_name,
        }),
        node_paths: (response.host_path_mappings.iter())
            .map(|mapping| NodePath {
                path: mapping.path.clone(),
                dir: mapping.dir.clone(),
                only_if_missing: mapping.only_if_missing,
            })
            .collect(),
    })
}

fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}
