//! The services of this node for a pod: images, volumes and network attachments, implemented by other crates.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use images::protocol::{PullCommand, PullOutput};
use images::{LayerHolds, PullPolicy, PullRequest};
use network::hub::{AttachRequest, HubAttachment};
use pod_protocol::Problem;
use sandbox::container_runtime::{
    ImageDefaults, ImageProblem, ImageProblemReason, ImagePullPolicy, ImageRequest, PodImage,
};
use sandbox::node_services::{NetworkAttachment, NodeServices, ReadyVolume};
use sandbox::runtime::PodDirs;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volumes::{PodVolumes, VolumeSource};

use super::SandboxConfig;
use super::puller::ImagePuller;
use crate::node_dir;

/// Retry interval of claiming the pod's address from a restarted hub.
const CLAIM_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long the hub may take to respond, if no deadline is nearer.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a pod may be without a network interface before its sandbox is restarted. A new hub takes about a second.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);

/// The resources of this node for one pod.
pub struct LocalNodeServices {
    puller: ImagePuller,
    host_ips: Vec<IpAddr>,
    uid: String,
    hub_socket: PathBuf,
    store: PathBuf,
    layers: PathBuf,
    /// Behind a mutex: an operation that was begun for a terminating pod completes before the volumes are removed.
    volumes: Arc<Mutex<PodVolumes>>,
    /// The task that keeps the pod's network attachment.
    attachment_task: RefCell<Option<AbortOnDropHandle<()>>>,
    /// Changes of the attachment: a new interface, or `None` if it was lost.
    changes: (
        mpsc::UnboundedSender<Option<NetworkAttachment>>,
        tokio::sync::Mutex<mpsc::UnboundedReceiver<Option<NetworkAttachment>>>,
    ),
    /// Images that the pod has, by reference, so that a restarted container does not need another pull.
    present: RefCell<HashMap<String, PodImage>>,
    /// Holds on the layers of these images.
    layer_holds: LayerHolds,
}

impl LocalNodeServices {
    /// The resources of the node of `config`.
    pub fn new(config: &SandboxConfig, pod_dirs: &PodDirs, puller: ImagePuller) -> Self {
        let (changed, changes) = mpsc::unbounded_channel();
        Self {
            puller,
            changes: (changed, tokio::sync::Mutex::new(changes)),
            host_ips: config.host_ips.clone(),
            uid: config.uid.clone(),
            hub_socket: node_dir::hub_sockets(&config.node_dir).outside,
            store: config.store.clone(),
            layers: node_dir::layers(&config.node_dir),
            volumes: Arc::new(Mutex::new(PodVolumes::new(
                pod_dirs.disk.join("volumes"),
                pod_dirs.memory.join("volumes"),
            ))),
            attachment_task: RefCell::new(None),
            present: RefCell::default(),
            layer_holds: LayerHolds::new(node_dir::layers(&config.node_dir)),
        }
    }

    /// Runs `work` on another thread. Large volumes, and those of slow servers, take minutes, and the sandbox has a single thread.
    async fn with_volumes<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PodVolumes) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let volumes = Arc::clone(&self.volumes);
        let work = move || work(&volumes.lock().unwrap());
        let result = tokio::task::spawn_blocking(work).await;
        result.map_err(|error| error.to_string()).flatten()
    }

    async fn pull(&self, request: PullRequest) -> anyhow::Result<PullOutput> {
        let pull = PullCommand {
            store: self.store.clone(),
            layers: self.layers.clone(),
            request,
        };
        let process = self.puller.start().await;
        if let Err(error) = &process
            && error.kind() == std::io::ErrorKind::BrokenPipe
        {
            // Only a new sandbox can fork non-dumpable processes again. The kubelet starts it, and it continues by the restart policy.
            tracing::error!(
                "the sandbox exits: all of its fork servers for image pulls were killed"
            );
            std::process::exit(1);
        }
        let mut process = process.context("cannot start a process for the pull")?;
        let mut line = serde_json::to_string(&pull)?;
        line.push('\n');
        process.input.write_all(line.as_bytes()).await?;
        let mut lines = BufReader::new(&mut process.output).lines();
        let mut last = None;
        while let Some(line) = lines.next_line().await? {
            match serde_json::from_str(&line)? {
                PullOutput::Progress(_) => {}
                end => last = Some(end),
            }
        }
        last.context("the process of the pull exited without a result")
    }
}

impl NodeServices for LocalNodeServices {
    fn host_ips(&self) -> Vec<IpAddr> {
        self.host_ips.clone()
    }

    async fn ensure_image(
        &self,
        request: &ImageRequest,
        credentials: &[Value],
    ) -> Result<PodImage, ImageProblem> {
        let failed = |message: String| ImageProblem {
            reason: ImageProblemReason::ErrImagePull,
            message,
        };
        let policy = match request.policy {
            ImagePullPolicy::Always => PullPolicy::Always,
            ImagePullPolicy::IfNotPresent => PullPolicy::IfNotPresent,
            ImagePullPolicy::Never => PullPolicy::Never,
        };
        let cached = self.present.borrow().get(&request.reference).cloned();
        if let (Some(image), PullPolicy::IfNotPresent | PullPolicy::Never) = (cached, policy) {
            return Ok(image);
        }
        let credentials = credentials
            .iter()
            .filter_map(|credential| serde_json::from_value(credential.clone()).ok())
            .collect();
        let request = PullRequest {
            reference: request.reference.clone(),
            policy,
            credentials,
        };
        let name = request.reference.clone();
        let mut attempts = 3;
        let image = loop {
            let image = match self.pull(request.clone()).await {
                Ok(PullOutput::Done(image)) => image,
                Ok(PullOutput::Failed { reason, message }) => {
                    let reason = ImageProblemReason::parse(&reason);
                    return Err(ImageProblem { reason, message });
                }
                Ok(PullOutput::Progress(_)) => {
                    return Err(failed("the pull did not end".to_owned()));
                }
                Err(error) => return Err(failed(format!("{error:#}"))),
            };
            attempts -= 1;
            match self.layer_holds.hold(&image.layers).await {
                Ok(()) => break image,
                // Garbage collection removed a layer after the pull.
                Err(error) if attempts > 0 => {
                    tracing::debug!(%error, "a layer was removed after the pull; pulling again")
                }
                Err(error) => return Err(failed(images::error_chain(&error))),
            }
        };
        let config = image.config;
        let image = PodImage {
            reference: image.reference,
            id: image.id,
            size: image.size,
            pulled: image.pulled,
            layers: image.layers,
            config: ImageDefaults {
                entrypoint: config.entrypoint,
                cmd: config.cmd,
                env: config.env,
                user: config.user,
                working_dir: config.working_dir,
                stop_signal: config.stop_signal,
                volumes: config.volumes,
            },
        };
        let mut cached = image.clone();
        cached.pulled = false;
        self.present.borrow_mut().insert(name, cached);
        Ok(image)
    }

    async fn set_up_volume(
        &self,
        name: &str,
        source: &Value,
        fs_group: Option<i64>,
    ) -> Result<ReadyVolume, Problem> {
        let failed = |message: String| {
            Problem::new(
                "FailedMount",
                format!("MountVolume.SetUp failed for volume \"{name}\" : {message}"),
            )
        };
        let source: VolumeSource =
            serde_json::from_value(source.clone()).map_err(|error| failed(error.to_string()))?;
        let volume = name.to_owned();
        let prepare = move |volumes: &PodVolumes| {
            let prepared = volumes.prepare(&volume, &source, fs_group);
            prepared.map_err(|error| error.to_string())
        };
        let prepared = self.with_volumes(prepare).await.map_err(failed)?;
        Ok(ReadyVolume::Directory {
            path: prepared.path,
            read_only: prepared.read_only,
        })
    }

    async fn attach_network(&self, network: OwnedFd) -> io::Result<NetworkAttachment> {
        let request = AttachRequest {
            uid: self.uid.clone(),
            claim: None,
        };
        // The sandbox retries, and reports each failure at the pod.
        let attached = HubAttachment::request(&self.hub_socket, &request, &network, ATTACH_TIMEOUT);
        let hub_attachment = attached.await?;
        let attachment = attachment(&hub_attachment);
        let keep = keep_attachment(
            self.hub_socket.clone(),
            request,
            hub_attachment,
            network,
            self.changes.0.clone(),
        );
        let task = tokio::task::spawn_local(keep);
        self.attachment_task
            .replace(Some(AbortOnDropHandle::new(task)));
        Ok(attachment)
    }

    async fn network_reattached(&self) -> Option<NetworkAttachment> {
        let mut changes = self.changes.1.lock().await;
        changes.recv().await.flatten()
    }

    async fn release(&self) {
        self.attachment_task.replace(None);
        let remove = |volumes: &PodVolumes| volumes.remove_all().map_err(|error| error.to_string());
        if let Err(error) = self.with_volumes(remove).await {
            tracing::warn!(error, "cannot remove a volume");
        }
    }
}

fn attachment(hub_attachment: &HubAttachment) -> NetworkAttachment {
    NetworkAttachment {
        interface: network::hub::INTERFACE.to_owned(),
        address: hub_attachment.address,
        gateway: hub_attachment.gateway,
    }
}

/// Keeps a pod's network attachment for as long as this future runs: if the hub's worker exits, claims the same address from the next
/// one. Sends `None` and returns if the pod has lost its interface and gets no new one in time.
async fn keep_attachment(
    hub_socket: PathBuf,
    mut request: AttachRequest,
    mut hub_attachment: HubAttachment,
    network: OwnedFd,
    changed: mpsc::UnboundedSender<Option<NetworkAttachment>>,
) {
    request.claim = Some(hub_attachment.address);
    loop {
        hub_attachment.hub_exited().await;
        let deadline = Instant::now() + CLAIM_TIMEOUT;
        hub_attachment = loop {
            // A hub that hangs must not keep the pod waiting without an interface.
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = if left.is_zero() { ATTACH_TIMEOUT } else { left };
            match HubAttachment::request(&hub_socket, &request, &network, timeout).await {
                Ok(hub_attachment) => break hub_attachment,
                Err(error) if Instant::now() >= deadline && !has_interface(&network) => {
                    tracing::warn!(%error, "the pod has lost its network");
                    let _ = changed.send(None);
                    return;
                }
                Err(error) => tracing::debug!(%error, "cannot claim the pod's address yet"),
            }
            tokio::time::sleep(CLAIM_RETRY_INTERVAL).await;
        };
        if hub_attachment.is_new {
            let _ = changed.send(Some(attachment(&hub_attachment)));
        }
    }
}

/// Whether the pod's network namespace still has the interface from the hub. If the check fails, assume that it does.
fn has_interface(network: &OwnedFd) -> bool {
    let has = || Ok(linux::route::RouteSocket::open()?.has_interface(network::hub::INTERFACE));
    let network = network.try_clone();
    network
        .and_then(|network| linux::setns::run_in_network_namespace(network, has))
        .unwrap_or(true)
}
