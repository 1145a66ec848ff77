//! The agent's story: report to the leader, be a kubelet, go away cleanly.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use control_plane::pki::{Identity, KUBELET_CLIENT};
use kubelet::{Capacity, KnownPods, NodeConfig};
use kubelet_api::ServerIdentity;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::identity::{Kept, NodeIdentity};
use super::line::{Admitted, Line, report};
use crate::handover::{Handover, ToLeader, ToNode};

/// As many pods as upstream's kubelet allows by default.
const MAX_PODS: u32 = 110;
/// After Slurm's word, the leader has this long to say the same.
const LEADER_GRACE: Duration = Duration::from_secs(10);
/// A line that breaks is tied again this often, in case it was the network and not the leader.
const RECONNECTS: u32 = 5;
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// Why an agent ends.
enum End {
    /// The leader said so.
    ByLeader,
    /// The leader is gone.
    LeaderLost,
    /// The kubelet can't go on.
    Failed(anyhow::Error),
}

/// Is this node's agent until the end.
pub async fn run(handover: Handover, kept: Kept) -> anyhow::Result<ExitCode> {
    let node = super::name();
    let Admitted {
        mut line,
        identity,
        leader,
        addresses,
    } = report(&handover, &node, kept.load()).await?;
    kept.save(&identity)?;

    let listener = TcpListener::bind("0.0.0.0:0")
        .await
        .context("cannot open the kubelet's port")?;
    let config = node_config(&node, &identity, addresses, listener.local_addr()?.port())?;
    let api = SocketAddr::new(leader, identity.welcome.api_port);
    let login = Identity {
        cert_pem: identity.welcome.client_cert_pem.clone(),
        key_pem: identity.client_key_pem.clone(),
    };
    let client = crate::client::connect(api, &identity.welcome.cluster_ca_pem, &login).await?;
    let pods = Arc::new(KnownPods::default());
    let stop = CancellationToken::new();
    let server = tokio::spawn(kubelet_api::serve(
        listener,
        server_identity(&identity),
        vec![KUBELET_CLIENT.to_owned()],
        pods.clone(),
        stop.clone(),
    ));
    let (tell_registered, registered) = oneshot::channel();
    let mut kubelet = tokio::spawn(kubelet::run(
        client,
        config,
        pods,
        tell_registered,
        stop.clone(),
    ));

    let end = tokio::select! {
        end = stay(&mut line, &handover, &node, &kept, registered) => end,
        ended = &mut kubelet => End::Failed(match ended {
            Ok(Ok(())) => anyhow::anyhow!("the kubelet ended by itself"),
            Ok(Err(error)) => error.into(),
            Err(panic) => panic.into(),
        }),
    };
    stop.cancel();
    if !matches!(end, End::Failed(_)) {
        let _ = kubelet.await;
    }
    let _ = server.await;
    match end {
        End::ByLeader => line.send(&ToLeader::Gone).await?,
        End::LeaderLost => clean_up_after_leader(&identity),
        End::Failed(error) => {
            let problem = format!("{error:#}");
            let _ = line.send(&ToLeader::Failed(problem)).await;
            return Err(error);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Holds the line to the leader until one of us is to end.
async fn stay(
    line: &mut Line,
    handover: &Handover,
    node: &str,
    kept: &Kept,
    registered: oneshot::Receiver<()>,
) -> End {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return End::Failed(anyhow::anyhow!("cannot listen for signals"));
    };
    let mut told = None;
    let mut registered = Some(registered);
    let mut is_registered = false;
    loop {
        tokio::select! {
            message = line.receive() => match message {
                Ok(Some(ToNode::End)) => return End::ByLeader,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => match reconnect(handover, node, kept).await {
                    Some(new) => {
                        *line = new;
                        if is_registered {
                            let _ = line.send(&ToLeader::Registered).await;
                        }
                    }
                    None => return End::LeaderLost,
                },
            },
            Ok(()) = async { registered.as_mut().expect("checked").await }, if registered.is_some() => {
                registered = None;
                is_registered = true;
                let _ = line.send(&ToLeader::Registered).await;
            }
            _ = terminate.recv() => {
                // Slurm ends the job. The leader may not know yet: a batch script is not signalled.
                let _ = line.send(&ToLeader::ToldToEnd).await;
                told.get_or_insert_with(|| tokio::time::Instant::now() + LEADER_GRACE);
            }
            () = until(told) => return End::LeaderLost,
        }
    }
}

async fn until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

async fn reconnect(handover: &Handover, node: &str, kept: &Kept) -> Option<Line> {
    let before = kept.load()?;
    for _ in 0..RECONNECTS {
        match report(handover, node, Some(before.clone())).await {
            Ok(admitted) => return Some(admitted.line),
            Err(error) => tracing::debug!(error = format!("{error:#}"), "the leader is away"),
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
    None
}

/// Does what the leader and its guard would have done, had they not been killed together.
fn clean_up_after_leader(identity: &NodeIdentity) {
    if let Err(error) = linux::process::kill_marked(&identity.welcome.mark) {
        tracing::warn!(%error, "cannot look for the workload's processes");
    }
    if let (job, Some(step)) = identity.welcome.job {
        crate::run::dismiss(job, step);
    }
}

fn server_identity(identity: &NodeIdentity) -> ServerIdentity {
    ServerIdentity {
        cert_chain_pem: identity.welcome.server_cert_pem.clone(),
        key_pem: identity.server_key_pem.clone(),
        client_ca_pem: identity.welcome.kubelet_client_ca_pem.clone(),
    }
}

fn node_config(
    node: &str,
    identity: &NodeIdentity,
    addresses: Vec<std::net::IpAddr>,
    kubelet_port: u16,
) -> anyhow::Result<NodeConfig> {
    let welcome = &identity.welcome;
    let scratch_dir = std::env::var_os("TMPDIR").map_or_else(|| "/tmp".into(), Into::into);
    let scratch = rustix::fs::statvfs(&scratch_dir).or_else(|_| rustix::fs::statvfs("/tmp"))?;
    Ok(NodeConfig {
        name: node.to_owned(),
        internal_ips: addresses,
        hostname: super::hostname(),
        kubelet_port,
        capacity: Capacity {
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
    })
}

fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}
