//! The agent's story: report to the leader, be a kubelet, go away cleanly.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use control_plane::pki::{KUBELET_CLIENT, TlsIdentity};
use kubelet::{LauncherKind, NodeCapacity, NodeConfig, NodeProcesses, PodManager};
use kubelet_api::{AccessPolicy, ServerIdentity};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::hub::NodeHub;
use super::identity::{Kept, NodeIdentity};
use super::image_gc;
use super::image_list::ImageList;
use super::launch::Launchers;
use super::line::{Admitted, Line, Refused, Replaced, is_leader_gone, is_worth_repeating, report};
use super::place::{self, NodePlace};
use super::streaming;
use crate::guard::LEFT_TO_OTHERS;
use crate::handover::{Handover, MARK, POD_MARK, ToLeader, ToNode};

/// As many pods as upstream's kubelet allows by default.
const MAX_PODS: u32 = 110;
/// The port of every other kubelet: who asks `nodes/NAME:10250/proxy` means this.
const USUAL_PORT: u16 = 10250;
/// After Slurm's word, the leader has this long to say the same.
const LEADER_GRACE: Duration = Duration::from_secs(10);
/// After so many refused connections in a row the leader is gone.
const REFUSALS: u32 = 5;
/// The first time, it is tried this often.
const JOINS: u32 = 4;
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Why an agent ends.
enum End {
    /// The leader said so.
    ByLeader,
    /// The leader is gone, or does not want us any more, or Slurm ends the job.
    LeaderLost {
        /// Nobody listens where it was: it died.
        dead: bool,
    },
    /// Another agent has taken over this node.
    Replaced,
    /// The kubelet can't go on.
    Failed(anyhow::Error),
}

/// Is this node's agent until the end.
///
/// `groups` is the control group in which those of pods are made, if there is one.
pub async fn run(
    handover: Handover,
    kept: Kept,
    place: NodePlace,
    groups: Option<PathBuf>,
) -> anyhow::Result<ExitCode> {
    let mut told = Told::listen()?;
    let image_gc = image_gc::settings()?;
    let node = super::name();
    let Admitted {
        line,
        identity,
        addresses,
    } = match join(&handover, &node, &kept, &mut told).await {
        Ok(admitted) => admitted,
        Err(end) => return not_admitted(end, &kept).await,
    };
    let mut line = Some(line);
    kept.save(&identity)?;

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
        mark: identity.welcome.mark.clone(),
        job: identity.welcome.job.0,
        node: node.clone(),
        open_files: linux::descriptors::raise_limit(None)?,
    });
    let api = SocketAddr::new(identity.leader, identity.welcome.api_port);
    let login = TlsIdentity {
        cert_pem: identity.welcome.client_cert_pem.clone(),
        key_pem: identity.client_key_pem.clone(),
    };
    let client = crate::client::connect(api, &identity.welcome.cluster_ca_pem, &login).await?;
    let pods = Arc::new(PodManager::default());
    pods.set_agent_log(Box::new(crate::log::remembered));
    let stop = CancellationToken::new();
    let authority = kubelet::WebhookAuth::new(client.clone(), node.clone());
    let server = tokio::spawn(kubelet_api::serve(
        listener,
        server_identity(&identity),
        AccessPolicy::for_common_names([KUBELET_CLIENT.to_owned()]).with_delegated_auth(Arc::new(authority)),
        pods.clone(),
        config.stream_idle_timeout,
        stop.clone(),
    ));
    let (tell_registered, registered) = oneshot::channel();
    let (ending, pods_grace) = (stop.clone(), identity.welcome.pods_grace);
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
    // While the node registers; a problem with it is one of the pods that need it.
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
        end = stay(&mut line, &handover, &node, &kept, registered, &mut told) => end,
        ended = &mut kubelet => End::Failed(match ended {
            Ok(Ok(())) => anyhow::anyhow!("the kubelet ended by itself"),
            Ok(Err(error)) => error.into(),
            Err(panic) => panic.into(),
        }),
    };
    match end {
        // The Node and its pods belong to our successor: neither is taken away.
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
        End::ByLeader => tell(&mut line, &ToLeader::Gone).await,
        End::LeaderLost { dead: true } => clean_up_after_leader(&identity).await,
        End::LeaderLost { dead: false } => {}
        End::Replaced => return Ok(ExitCode::from(LEFT_TO_OTHERS)),
        End::Failed(error) => {
            let problem = format!("{error:#}");
            tell(&mut line, &ToLeader::Failed(problem)).await;
            return Err(error);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The usual port, or any if another cluster, or another user, has that on this machine.
async fn listen() -> std::io::Result<TcpListener> {
    match TcpListener::bind(("0.0.0.0", USUAL_PORT)).await {
        Ok(listener) => Ok(listener),
        Err(_) => TcpListener::bind("0.0.0.0:0").await,
    }
}

/// Reports to the leader: for the first time, or in place of an agent that died.
async fn join(
    handover: &Handover,
    node: &str,
    kept: &Kept,
    told: &mut Told,
) -> Result<Admitted, End> {
    let joining = async {
        match kept.load() {
            None => first_join(handover, node).await,
            Some(_) => reconnect(handover, node, kept).await,
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

/// Reports for the first time. The door may be crowded by strangers for a while, and the network slow.
async fn first_join(handover: &Handover, node: &str) -> Result<Admitted, End> {
    let mut attempt = 1;
    loop {
        match report(handover, node, None).await {
            Ok(admitted) => return Ok(admitted),
            Err(error) if error.is::<Replaced>() => return Err(End::Replaced),
            Err(error) if is_worth_repeating(&error) && attempt < JOINS => {
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

/// What an agent does that is not admitted.
async fn not_admitted(end: End, kept: &Kept) -> anyhow::Result<ExitCode> {
    match end {
        End::Replaced => return Ok(ExitCode::from(LEFT_TO_OTHERS)),
        End::Failed(error) => return Err(error),
        End::LeaderLost { dead: true } => {
            if let Some(identity) = kept.load() {
                clean_up_after_leader(&identity).await;
            }
        }
        End::LeaderLost { dead: false } | End::ByLeader => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Holds the line to the leader until one of us is to end.
async fn stay(
    line: &mut Option<Line>,
    handover: &Handover,
    node: &str,
    kept: &Kept,
    registered: oneshot::Receiver<()>,
    told: &mut Told,
) -> End {
    let mut is_registered = false;
    // After it has answered, it must not be asked again.
    let mut registered = std::pin::pin!(futures::FutureExt::fuse(registered));
    if told.deadline.is_some() {
        tell(line, &ToLeader::ToldToEnd).await;
    }
    loop {
        let deadline = told.deadline;
        tokio::select! {
            heard = hear(line, handover, node, kept) => match heard {
                Ok(Heard::Message(ToNode::End)) => return End::ByLeader,
                Ok(Heard::Message(ToNode::Replaced)) => return End::Replaced,
                Ok(Heard::Message(ToNode::Welcome(_) | ToNode::Refused(_))) => {}
                Ok(Heard::Silence) => tracing::warn!(node, "lost the connection to the leader"),
                Ok(Heard::Leader) => {
                    tracing::info!(node, "connected to the leader again");
                    if is_registered {
                        tell(line, &ToLeader::Registered).await;
                    }
                    if told.deadline.is_some() {
                        tell(line, &ToLeader::ToldToEnd).await;
                    }
                }
                Err(end) => return end,
            },
            Ok(()) = &mut registered => {
                is_registered = true;
                tell(line, &ToLeader::Registered).await;
            }
            () = told.ending() => {
                if let Err(end) = told.take_note() {
                    return end;
                }
                // Slurm ends the job. The leader may not know yet: a batch script is not signalled.
                tell(line, &ToLeader::ToldToEnd).await;
            }
            () = until(deadline) => return End::LeaderLost { dead: false },
        }
    }
}

/// What comes over the line.
enum Heard {
    /// A word of the leader.
    Message(ToNode),
    /// The line is broken.
    Silence,
    /// There is a line again.
    Leader,
}

/// Waits for the leader's next word or, without a line, for a new line.
async fn hear(
    line: &mut Option<Line>,
    handover: &Handover,
    node: &str,
    kept: &Kept,
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
    *line = Some(reconnect(handover, node, kept).await?.line);
    Ok(Heard::Leader)
}

/// Tells the leader something, if there is a line. If that breaks, the next wait for a message says so.
async fn tell(line: &mut Option<Line>, message: &ToLeader) {
    if let Some(line) = line {
        let _ = line.send(message).await;
    }
}

/// The signals with which Slurm, or a person, ends a job.
struct Told {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    guard: Option<rustix::process::Pid>,
    /// When to end if the leader has not said so by then.
    deadline: Option<Instant>,
}

impl Told {
    /// From now on they don't end us at once.
    fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            guard: rustix::process::getppid(),
            deadline: None,
        })
    }

    /// Takes note of a signal: the leader has a while to say the same. An `Err` if it wasn't Slurm's.
    fn take_note(&mut self) -> Result<(), End> {
        if rustix::process::getppid() != self.guard {
            // Not Slurm's word but our guard's death. A new agent, with a guard, takes over.
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

/// Ties the line again, however long the network is away: pods go on, and Slurm ends the job. If the leader is gone or refuses, what
/// that means for us.
async fn reconnect(handover: &Handover, node: &str, kept: &Kept) -> Result<Admitted, End> {
    let mut refusals = 0;
    loop {
        let error = match report(handover, node, kept.load()).await {
            Ok(admitted) => return Ok(admitted),
            Err(error) if error.is::<Replaced>() => return Err(End::Replaced),
            Err(error) if error.is::<Refused>() => {
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

/// Does what the leader and its guard would have done, had they not been killed together.
async fn clean_up_after_leader(identity: &NodeIdentity) {
    for name in [MARK, POD_MARK] {
        let mark = format!("{name}={}", identity.welcome.mark);
        if let Err(error) = linux::process::kill_marked(&mark) {
            tracing::warn!(%error, "cannot look for what the cluster has left");
        }
    }
    if let (job, Some(step)) = identity.welcome.job {
        crate::run::dismiss(job, step).await;
    }
}

fn server_identity(identity: &NodeIdentity) -> ServerIdentity {
    ServerIdentity {
        cert_chain_pem: identity.welcome.server_cert_pem.clone(),
        key_pem: identity.server_key_pem.clone(),
        client_ca_pem: identity.welcome.kubelet_client_ca_pem.clone(),
    }
}

fn node_hub(identity: &NodeIdentity, place: &NodePlace) -> Arc<NodeHub> {
    let range = &identity.welcome.pod_cidr;
    Arc::new(NodeHub::new(
        &place.dir,
        place.hub_socket(),
        range,
        &identity.welcome.mark,
    ))
}

fn node_config(
    node: &str,
    identity: &NodeIdentity,
    addresses: Vec<std::net::IpAddr>,
    kubelet_port: u16,
    place: &NodePlace,
) -> anyhow::Result<NodeConfig> {
    let welcome = &identity.welcome;
    let scratch_dir = place::scratch();
    let scratch = rustix::fs::statvfs(&scratch_dir).or_else(|_| rustix::fs::statvfs("/tmp"))?;
    Ok(NodeConfig {
        name: node.to_owned(),
        internal_ips: addresses,
        hostname: super::hostname(),
        kubelet_port,
        capacity: NodeCapacity {
            cpus: welcome.cpus,
            memory_bytes: match welcome.memory_bytes {
                Some(bytes) => bytes,
                // Slurm doesn't count memory here, so all of the host's is there to be used.
                None => total_memory(),
            },
            ephemeral_storage_bytes: scratch.f_bavail * scratch.f_frsize,
            pods: MAX_PODS,
            extended: welcome.extended.clone(),
        },
        labels: welcome.labels.clone(),
        annotations: std::collections::BTreeMap::new(),
        kubelet_version: format!(
            "{}+coracle-{}",
            welcome.kubernetes_version,
            crate::handover::VERSION
        ),
        scratch_dir,
        node_dir: place.dir.clone(),
        node_key: place.key.clone(),
        launcher: match welcome.pods_as_steps {
            true => LauncherKind::Step,
            false => LauncherKind::Fork,
        },
        pod_cidrs: vec![welcome.pod_cidr.clone()],
        cluster_dns: Vec::new(),
        cluster_domain: "cluster.local".to_owned(),
        stream_idle_timeout: streaming::idle_timeout()?,
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
