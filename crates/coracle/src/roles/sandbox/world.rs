//! Provides images, volumes and network attachments of this node to a pod, from the other crates.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use images::protocol::{PullCommand, PullOutput};
use images::{PullPolicy, PullRequest};
use network::hub::{AttachRequest, HubAttachment};
use pod_protocol::Problem;
use sandbox::runtime::PodDirs;
use sandbox::seams::{Attachment, ImageDefaults, ImageRequest, PodImage, Volume, World};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volumes::{PodVolumes, VolumeSource};

use super::SandboxStart;
use super::held::HeldLayers;
use super::puller::Puller;
use crate::node_dir;

/// Retry interval of claiming the pod's address from a restarted hub.
const CLAIM_PAUSE: Duration = Duration::from_millis(200);
/// How long a pod may be without a network interface before its sandbox is restarted. A new hub takes about a second.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);

/// The resources of this node for one pod.
pub struct NodeWorld {
    puller: Puller,
    uid: String,
    hub: PathBuf,
    store: PathBuf,
    layers: PathBuf,
    /// Behind a mutex: an operation that was begun for a terminating pod completes before the volumes are removed.
    volumes: Arc<Mutex<PodVolumes>>,
    /// The task that keeps the pod's network attachment.
    place: RefCell<Option<AbortOnDropHandle<()>>>,
    /// Changes of the attachment: a new interface, or `None` if it was lost.
    changes: (
        mpsc::UnboundedSender<Option<Attachment>>,
        tokio::sync::Mutex<mpsc::UnboundedReceiver<Option<Attachment>>>,
    ),
    /// Images that the pod has, by reference, so that a restarted container does not need another pull.
    present: RefCell<HashMap<String, PodImage>>,
    /// Holds on the layers of these images.
    held: HeldLayers,
}

impl NodeWorld {
    /// The resources of the node of `start`.
    pub fn new(start: &SandboxStart, places: &PodDirs, puller: Puller) -> Self {
        let (changed, changes) = mpsc::unbounded_channel();
        Self {
            puller,
            changes: (changed, tokio::sync::Mutex::new(changes)),
            uid: start.uid.clone(),
            hub: start.node_dir.join("hub.sock"),
            store: start.store.clone(),
            layers: node_dir::layers(&start.node_dir),
            volumes: Arc::new(Mutex::new(PodVolumes::new(
                places.disk.join("volumes"),
                places.memory.join("volumes"),
            ))),
            place: RefCell::new(None),
            present: RefCell::default(),
            held: HeldLayers::new(node_dir::layers(&start.node_dir)),
        }
    }

    /// Runs `work` on another thread. Large volumes, and those of slow servers, take minutes, and the sandbox has a single thread.
    async fn with_volumes<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PodVolumes) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let volumes = Arc::clone(&self.volumes);
        let work = move || work(&volumes.lock().unwrap_or_else(PoisonError::into_inner));
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|error| error.to_string()).flatten()
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
                "the pod's sandbox ends: all of its fork servers for image pulls were killed"
            );
            std::process::exit(1);
        }
        let mut process = process.context("cannot start a process to pull it")?;
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
        last.context("the process that pulled it ended without a result")
    }
}

impl World for NodeWorld {
    async fn image(
        &self,
        request: &ImageRequest,
        credentials: &[Value],
    ) -> Result<PodImage, Problem> {
        let wrong = |reason: &str, message: String| Problem {
            reason: reason.to_owned(),
            message,
        };
        let policy = match request.policy.as_str() {
            "Always" => PullPolicy::Always,
            "Never" => PullPolicy::Never,
            _ => PullPolicy::IfNotPresent,
        };
        let known = self.present.borrow().get(&request.reference).cloned();
        if let (Some(image), PullPolicy::IfNotPresent | PullPolicy::Never) = (known, policy) {
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
                Ok(PullOutput::Failed { reason, message }) => return Err(wrong(&reason, message)),
                Ok(PullOutput::Progress(_)) => {
                    return Err(wrong("ErrImagePull", "it did not end".to_owned()));
                }
                Err(error) => return Err(wrong("ErrImagePull", format!("{error:#}"))),
            };
            attempts -= 1;
            match self.held.hold(&image.layers).await {
                Ok(()) => break image,
                // Garbage collection removed a layer after the pull.
                Err(error) if attempts > 0 => tracing::debug!(error, "unpacking it again"),
                Err(error) => return Err(wrong("ErrImagePull", error)),
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
        let mut again = image.clone();
        again.pulled = false;
        self.present.borrow_mut().insert(name, again);
        Ok(image)
    }

    async fn volume(
        &self,
        name: &str,
        source: &Value,
        fs_group: Option<i64>,
        credentials: &[Value],
    ) -> Result<Volume, Problem> {
        let failed = |message: String| Problem {
            reason: "FailedMount".to_owned(),
            message: format!("MountVolume.SetUp failed for volume \"{name}\" : {message}"),
        };
        let source: VolumeSource =
            serde_json::from_value(source.clone()).map_err(|error| failed(error.to_string()))?;
        if let VolumeSource::Image {
            reference,
            pull_policy,
        } = source
        {
            let request = ImageRequest {
                reference,
                policy: pull_policy,
            };
            let image = self.image(&request, credentials).await?;
            return Ok(Volume::Layers(image.layers));
        }
        let own = name.to_owned();
        let prepare = move |volumes: &PodVolumes| {
            let prepared = volumes.prepare(&own, &source, fs_group);
            prepared.map_err(|error| error.to_string())
        };
        let prepared = self.with_volumes(prepare).await.map_err(failed)?;
        Ok(Volume::Directory {
            path: prepared.path,
            read_only: prepared.read_only,
        })
    }

    async fn attach(&self, network: OwnedFd) -> Result<Attachment, Problem> {
        let request = AttachRequest {
            uid: self.uid.clone(),
            claim: None,
        };
        let failed = |error: std::io::Error| Problem {
            reason: "FailedCreatePodSandBox".to_owned(),
            message: format!("failed to setup network for sandbox: {error}"),
        };
        let place = HubAttachment::request(&self.hub, &request, &network)
            .await
            .map_err(failed)?;
        let attachment = attachment(&place);
        let keep = keep_place(
            self.hub.clone(),
            request,
            place,
            network,
            self.changes.0.clone(),
        );
        let task = tokio::task::spawn_local(keep);
        self.place.replace(Some(AbortOnDropHandle::new(task)));
        Ok(attachment)
    }

    async fn reattached(&self) -> Option<Attachment> {
        let mut changes = self.changes.1.lock().await;
        changes.recv().await.flatten()
    }

    async fn leave(&self) {
        self.place.replace(None);
        let remove = |volumes: &PodVolumes| volumes.remove_all().map_err(|error| error.to_string());
        if let Err(error) = self.with_volumes(remove).await {
            tracing::warn!(error, "cannot remove a volume");
        }
    }
}

fn attachment(place: &HubAttachment) -> Attachment {
    Attachment {
        interface: network::hub::INTERFACE.to_owned(),
        address: place.address,
        prefix: place.prefix,
        gateway: place.gateway,
    }
}

/// Keeps a pod's network attachment for as long as this future runs: if the hub's worker exits, claims the same address from the next
/// one. Sends `None` and returns if the pod has lost its interface and gets no new one in time.
async fn keep_place(
    hub: PathBuf,
    mut request: AttachRequest,
    mut place: HubAttachment,
    network: OwnedFd,
    changed: mpsc::UnboundedSender<Option<Attachment>>,
) {
    request.claim = Some(place.address);
    loop {
        place.hub_exited().await;
        let deadline = Instant::now() + CLAIM_TIMEOUT;
        place = loop {
            match HubAttachment::request(&hub, &request, &network).await {
                Ok(place) => break place,
                Err(error) if Instant::now() > deadline && !has_interface(&network) => {
                    tracing::warn!(%error, "the pod has lost its network");
                    let _ = changed.send(None);
                    return;
                }
                Err(error) => tracing::debug!(%error, "cannot claim the pod's address yet"),
            }
            tokio::time::sleep(CLAIM_PAUSE).await;
        };
        if place.is_new {
            let _ = changed.send(Some(attachment(&place)));
        }
    }
}

/// Whether the pod's network namespace still has the interface from the hub. If the check fails, assume that it does.
fn has_interface(network: &OwnedFd) -> bool {
    let has = || Ok(linux::route::Route::open()?.has(network::hub::INTERFACE));
    let network = network.try_clone();
    network
        .and_then(|network| linux::fresh::in_network(network, has))
        .unwrap_or(true)
}
