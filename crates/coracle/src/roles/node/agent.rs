//! The agent: enrols with the leader, runs the kubelet, and shuts down in order.

use std::net::SocketAddr;
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
use kubelet::{LauncherKind, NodeCapacity, NodeConfig, NodeProcesses, PodManager};
use kubelet_api::{AccessPolicy, ServerIdentity};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::hub::NodeHub;
use super::image_gc;
use super::image_list::ImageList;
use super::launch::Launchers;
use crate::guard::LEFT_TO_OTHERS;
use crate::node_dir::{self, NodeDir};
use crate::settings::stream_idle;

/// Upstream's default.
const MAX_PODS: u32 = 110;
/// The usual port of kubelets, which clients of `nodes/NAME:10250/proxy` expect.
const USUAL_PORT: u16 = 10250;
/// How long the agent waits for the leader's `End` message after a signal from Slurm.
const LEADER_GRACE: Duration = Duration::from_secs(10);
/// After this many refused connections in a row, the leader is considered dead.
const REFUSALS: u32 = 5;
/// Attempts to enrol for the first time.
const JOINS: u32 = 4;
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Why an agent ends.
enum End {
    /// The leader sent `End`.
    ByLeader,
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

/// Runs this node's agent until it is to end.
///
/// `groups` is the parent cgroup of the pods' cgroups, if there is one.
pub async fn run(
    join_config: JoinConfig,
    saved: SavedIdentity,
    place: NodeDir,
    groups: Option<PathBuf>,
) -> anyhow::Result<ExitCode> {
    let mut told = Told::listen()?;
    let image_gc = image_gc::settings()?;
    let node = super::name();
    let Enrolled {
        connection,
        identity,
        addresses,
    } = match join(&join_config, &node, &saved, &mut told).await {
        Ok(admitted) => admitted,
        Err(end) => return not_admitted(end, &saved).await,
    };
    let mut line = Some(connection);
    saved.save(&identity)?;

    let listener = listen().await.context("cannot open the kubelet's port")?;
    place
        .make()
        .with_context(|| format!("cannot make the node's directory {}", place.dir.display()))?;
    let port = listener.local_addr()?.port();
    let config = node_config(&node, &identity, addresses, port, &place)?;
    let hub = node_hub(&identity, &place);
    let launcher = Arc::new(Launchers {
        place: place.clone(),
        hub: hub.clone(),
        store: images::ImageStore::default_path()
            .context("neither XDG_DATA_HOME nor HOME says where images are")?,
        groups,
        images: ImageList::default(),
        stacking: tokio::sync::OnceCell::new(),
        job: identity.response.job.0,
        node: node.clone(),
        open_files: linux::descriptors::raise_limit(None)?,
    });
    let api = SocketAddr::new(identity.leader, identity.response.api_port);
    let login = TlsIdentity {
        cert_pem: identity.response.client_cert_pem.clone(),
        key_pem: identity.client_key_pem.clone(),
    };
    let client = cluster::client::connect(api, &identity.response.cluster_ca_pem, &login).await?;
    let pods = Arc::new(PodManager::default());
    pods.set_agent_log(Box::new(crate::log::remembered));
    let stop = CancellationToken::new();
    let authority = kubelet::WebhookAuth::new(client.clone(), node.clone());
    let server = tokio::spawn(kubelet_api::serve(
        listener,
        server_identity(&identity),
        AccessPolicy::for_common_names([KUBELET_CLIENT.to_owned()])
            .with_delegated_auth(Arc::new(authority)),
        pods.clone(),
        config.stream_idle_timeout,
        stop.clone(),
    ));
    let (tell_registered, registered) = oneshot::channel();
    let (ending, pods_grace) = (stop.clone(), identity.response.pods_grace);
    let mut kubelet = tokio::spawn(kubelet::run(
        client,
        config,
        launcher.clone(),
        pods,
        tell_registered,
        async move {
            ending.cancelled().await;
            pods_grace
        },
    ));
    // Runs while the node registers. A failure affects only the pods that need it, so it is not fatal here.
    let (hub_ready, stacking) = tokio::join!(hub.ready(), launcher.stacking());
    for error in [hub_ready.err(), stacking.err()].into_iter().flatten() {
        tracing::warn!(error = format!("{error:#}"), "pods can't run on this node");
    }
    let hub_keeper = tokio::spawn({
        let hub = hub.clone();
        async move { hub.keep_up().await }
    });

    let end = tokio::select! {
        () = image_gc::look_after(place.dir.clone(), image_gc) => End::Failed(anyhow::anyhow!("nobody looks after images")),
        end = stay(&mut line, &join_config, &node, &saved, registered, &mut told) => end,
        ended = &mut kubelet => End::Failed(match ended {
            Ok(Ok(())) => anyhow::anyhow!("the kubelet ended by itself"),
            Ok(Err(error)) => error.into(),
            Err(panic) => panic.into(),
        }),
    };
    match end {
        // The next agent adopts the Node and its pods, so do not delete them.
        End::Replaced | End::Failed(_) => kubelet.abort(),
        End::ByLeader | End::LeaderLost { .. } => {
            stop.cancel();
            let _ = kubelet.await;
        }
    }
    stop.cancel();
    let _ = server.await;
    hub_keeper.abort();
    if !matches!(end, End::Replaced | End::Failed(_)) {
        hub.end().await;
    }
    match end {
        End::ByLeader => tell(&mut line, &AgentMessage::Left).await,
        End::LeaderLost { dead: true } => clean_up_after_leader(&identity).await,
        End::LeaderLost { dead: false } => {}
        End::Replaced => return Ok(ExitCode::from(LEFT_TO_OTHERS)),
        End::Failed(error) => {
            let problem = format!("{error:#}");
            tell(&mut line, &AgentMessage::Failed(problem)).await;
            return Err(error);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Binds the usual port, or any free one if another kubelet on this machine uses it.
async fn listen() -> std::io::Result<TcpListener> {
    match TcpListener::bind(("0.0.0.0", USUAL_PORT)).await {
        Ok(listener) => Ok(listener),
        Err(_) => TcpListener::bind("0.0.0.0:0").await,
    }
}

/// Enrols with the leader: for the first time, or with the identity of an agent that died.
async fn join(
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
    told: &mut Told,
) -> Result<Enrolled, End> {
    let joining = async {
        match saved.load() {
            None => first_join(join_config, node).await,
            Some(_) => reconnect(join_config, node, saved).await,
        }
    };
    let mut joining = std::pin::pin!(joining);
    loop {
        let deadline = told.deadline;
        tokio::select! {
            joined = &mut joining => return joined,
            () = told.ending() => told.take_note()?,
            () = until(deadline) => return Err(End::LeaderLost { dead: false }),
        }
    }
}

/// Enrols for the first time. Retries, because the leader's listener may be full of unauthenticated connections and the network slow.
async fn first_join(join_config: &JoinConfig, node: &str) -> Result<Enrolled, End> {
    let mut attempt = 1;
    loop {
        match enrol(join_config, node, None).await {
            Ok(admitted) => return Ok(admitted),
            Err(error) if error.is::<NodeTaken>() => return Err(End::Replaced),
            Err(error) if is_retryable(&error) && attempt < JOINS => {
                tracing::warn!(
                    node,
                    error = format!("{error:#}"),
                    "cannot reach the leader yet"
                );
                attempt += 1;
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
            Err(error) => return Err(End::Failed(error)),
        }
    }
}

/// Ends an agent that could not enrol.
async fn not_admitted(end: End, saved: &SavedIdentity) -> anyhow::Result<ExitCode> {
    match end {
        End::Replaced => return Ok(ExitCode::from(LEFT_TO_OTHERS)),
        End::Failed(error) => return Err(error),
        End::LeaderLost { dead: true } => {
            if let Some(identity) = saved.load() {
                clean_up_after_leader(&identity).await;
            }
        }
        End::LeaderLost { dead: false } | End::ByLeader => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Keeps the connection to the leader, and reconnects, until the agent is to end.
async fn stay(
    line: &mut Option<LeaderConnection>,
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
    registered: oneshot::Receiver<()>,
    told: &mut Told,
) -> End {
    let mut is_registered = false;
    // Fused, because a oneshot receiver must not be polled after it has completed.
    let mut registered = std::pin::pin!(futures::FutureExt::fuse(registered));
    if told.deadline.is_some() {
        tell(line, &AgentMessage::JobEnding).await;
    }
    loop {
        let deadline = told.deadline;
        tokio::select! {
            heard = hear(line, join_config, node, saved) => match heard {
                Ok(Heard::Message(LeaderMessage::End)) => return End::ByLeader,
                Ok(Heard::Message(LeaderMessage::NodeTaken)) => return End::Replaced,
                Ok(Heard::Message(LeaderMessage::Welcome(_) | LeaderMessage::Refused(_))) => {}
                Ok(Heard::Silence) => tracing::warn!(node, "lost the connection to the leader"),
                Ok(Heard::Leader) => {
                    tracing::info!(node, "connected to the leader again");
                    if is_registered {
                        tell(line, &AgentMessage::Registered).await;
                    }
                    if told.deadline.is_some() {
                        tell(line, &AgentMessage::JobEnding).await;
                    }
                }
                Err(end) => return end,
            },
            Ok(()) = &mut registered => {
                is_registered = true;
                tell(line, &AgentMessage::Registered).await;
            }
            () = told.ending() => {
                if let Err(end) = told.take_note() {
                    return end;
                }
                // Slurm ends the job. The leader may not know yet: Slurm does not signal a batch script.
                tell(line, &AgentMessage::JobEnding).await;
            }
            () = until(deadline) => return End::LeaderLost { dead: false },
        }
    }
}

/// Events of the connection to the leader.
enum Heard {
    /// The leader sent a message.
    Message(LeaderMessage),
    /// The connection was lost.
    Silence,
    /// The agent reconnected.
    Leader,
}

/// Waits for the leader's next message or, without a connection, reconnects.
async fn hear(
    line: &mut Option<LeaderConnection>,
    join_config: &JoinConfig,
    node: &str,
    saved: &SavedIdentity,
) -> Result<Heard, End> {
    if let Some(open) = line {
        return Ok(match open.receive().await {
            Ok(Some(message)) => Heard::Message(message),
            Ok(None) | Err(_) => {
                *line = None;
                Heard::Silence
            }
        });
    }
    *line = Some(reconnect(join_config, node, saved).await?.connection);
    Ok(Heard::Leader)
}

/// Sends a message to the leader if there is a connection. Ignores errors: the next receive reports them.
async fn tell(line: &mut Option<LeaderConnection>, message: &AgentMessage) {
    if let Some(line) = line {
        let _ = line.send(message).await;
    }
}

/// The signals with which Slurm, or a user, ends a job.
struct Told {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    guard: Option<rustix::process::Pid>,
    /// When to end without an `End` message from the leader.
    deadline: Option<Instant>,
}

impl Told {
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
    fn take_note(&mut self) -> Result<(), End> {
        if rustix::process::getppid() != self.guard {
            // The guard was killed. A new agent, with a new guard, takes over.
            return Err(End::Failed(anyhow::anyhow!("its guard was killed")));
        }
        self.deadline
            .get_or_insert_with(|| Instant::now() + LEADER_GRACE);
        Ok(())
    }

    async fn ending(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

async fn until(deadline: Option<Instant>) {
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
) -> Result<Enrolled, End> {
    let mut refusals = 0;
    loop {
        let error = match enrol(join_config, node, saved.load()).await {
            Ok(admitted) => return Ok(admitted),
            Err(error) if error.is::<NodeTaken>() => return Err(End::Replaced),
            Err(error) if error.is::<EnrolmentRefused>() => {
                tracing::warn!(node, %error, "ending");
                return Err(End::LeaderLost { dead: false });
            }
            Err(error) => error,
        };
        tracing::debug!(error = format!("{error:#}"), "cannot reach the leader");
        refusals = match is_leader_gone(&error) {
            true => refusals + 1,
            false => 0,
        };
        if refusals == REFUSALS {
            return Err(End::LeaderLost { dead: true });
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// Cleans up for a leader that was killed together with its guard. This agent's guard cleans up the node.
async fn clean_up_after_leader(identity: &NodeIdentity) {
    let mark = format!("{WORKLOAD_MARK}={}", identity.response.mark);
    if let Err(error) = linux::process::kill_marked(&mark) {
        tracing::warn!(%error, "cannot look for what the cluster has left");
    }
    if let (job, Some(step)) = identity.response.job {
        crate::waiting_tasks::dismiss(job, step).await;
    }
}

fn server_identity(identity: &NodeIdentity) -> ServerIdentity {
    ServerIdentity {
        cert_chain_pem: identity.response.server_cert_pem.clone(),
        key_pem: identity.server_key_pem.clone(),
        client_ca_pem: identity.response.kubelet_client_ca_pem.clone(),
    }
}

fn node_hub(identity: &NodeIdentity, place: &NodeDir) -> Arc<NodeHub> {
    let range = &identity.response.pod_cidr;
    Arc::new(NodeHub::new(
        &place.dir,
        place.hub_socket(),
        range,
        place.mark_argument(),
    ))
}

fn node_config(
    node: &str,
    identity: &NodeIdentity,
    addresses: Vec<std::net::IpAddr>,
    kubelet_port: u16,
    place: &NodeDir,
) -> anyhow::Result<NodeConfig> {
    let response = &identity.response;
    let scratch_dir = node_dir::scratch();
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
        scratch_dir,
        node_dir: place.dir.clone(),
        node_key: place.key.clone(),
        launcher: match response.pods_as_steps {
            true => LauncherKind::Step,
            false => LauncherKind::Fork,
        },
        pod_cidrs: vec![response.pod_cidr.clone()],
        cluster_dns: Vec::new(),
        cluster_domain: "cluster.local".to_owned(),
        stream_idle_timeout: stream_idle::timeout()?,
        processes: slurm::JobProcessMarkers::of_current_job().map(|job| NodeProcesses {
            environment: job.env_variable,
            cgroup: job.cgroup_name,
        }),
    })
}

fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}
