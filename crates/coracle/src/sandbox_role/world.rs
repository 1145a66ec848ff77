//! What the other crates give to a pod: images, volumes, a place in the network.

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
use sandbox::container_runtime::{ImagePullPolicy, ImageDefaults, ImageRequest, PodImage};
use sandbox::node_services::{NetworkAttachment, NodeServices, ReadyVolume};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volumes::{VolumeSource, PodVolumes};

use super::Start;
use super::held::HeldLayers;
use super::puller::Puller;
use crate::node::place;

/// Between attempts to get a place back from a hub that was started again.
const CLAIM_PAUSE: Duration = Duration::from_millis(200);
/// How long a pod may be without an interface before it is restarted. A new hub takes about a second.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);

/// This node, for one pod.
pub struct NodeWorld {
    puller: Puller,
    uid: String,
    hub: PathBuf,
    store: PathBuf,
    layers: PathBuf,
    /// One at a time: what was begun for a pod that is to end is done before it is removed.
    volumes: Arc<Mutex<PodVolumes>>,
    /// Keeps the pod's place in the network.
    place: RefCell<Option<AbortOnDropHandle<()>>>,
    /// What becomes of it: a new interface, or none.
    changes: (
        mpsc::UnboundedSender<Option<NetworkAttachment>>,
        tokio::sync::Mutex<mpsc::UnboundedReceiver<Option<NetworkAttachment>>>,
    ),
    /// Images that are there, by reference: a container that is started again need not ask.
    present: RefCell<HashMap<String, PodImage>>,
    /// And whose layers nobody may remove.
    held: HeldLayers,
}

impl NodeWorld {
    /// The node of `start`.
    pub fn new(start: &Start, places: &PodDirs, puller: Puller) -> Self {
        let (changed, changes) = mpsc::unbounded_channel();
        Self {
            puller,
            changes: (changed, tokio::sync::Mutex::new(changes)),
            uid: start.uid.clone(),
            hub: start.node_dir.join("hub.sock"),
            store: start.store.clone(),
            layers: place::layers(&start.node_dir),
            volumes: Arc::new(Mutex::new(PodVolumes::new(
                places.disk.join("volumes"),
                places.memory.join("volumes"),
            ))),
            place: RefCell::new(None),
            present: RefCell::default(),
            held: HeldLayers::new(place::layers(&start.node_dir)),
        }
    }

    /// Does something with volumes. Large ones, and those of slow servers, take minutes, and this thread is the pod's only one.
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
            // Only a new sandbox has a new one: the kubelet starts it, and it goes on by the pod's policy.
            tracing::error!("the pod's puller of images was killed");
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

impl NodeServices for NodeWorld {
    async fn ensure_image(
        &self,
        request: &ImageRequest,
        credentials: &[Value],
    ) -> Result<PodImage, Problem> {
        let wrong = |reason: &str, message: String| Problem {
            reason: reason.to_owned(),
            message,
        };
        let policy = match request.policy {
            ImagePullPolicy::Always => PullPolicy::Always,
            ImagePullPolicy::Never => PullPolicy::Never,
            ImagePullPolicy::IfNotPresent => PullPolicy::IfNotPresent,
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
                // Removed in just this moment, by somebody who makes room.
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

    async fn set_up_volume(
        &self,
        name: &str,
        source: &Value,
        fs_group: Option<i64>,
        credentials: &[Value],
    ) -> Result<ReadyVolume, Problem> {
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
            let policy = ImagePullPolicy::from_spec(Some(&pull_policy), &reference);
            let request = ImageRequest { reference, policy };
            let image = self.ensure_image(&request, credentials).await?;
            return Ok(ReadyVolume::Layers(image.layers));
        }
        let own = name.to_owned();
        let prepare = move |volumes: &PodVolumes| {
            let prepared = volumes.prepare(&own, &source, fs_group);
            prepared.map_err(|error| error.to_string())
        };
        let prepared = self.with_volumes(prepare).await.map_err(failed)?;
        Ok(ReadyVolume::Directory {
            path: prepared.path,
            read_only: prepared.read_only,
        })
    }

    async fn attach_network(&self, network: OwnedFd) -> Result<NetworkAttachment, Problem> {
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

    async fn network_reattached(&self) -> Option<NetworkAttachment> {
        let mut changes = self.changes.1.lock().await;
        changes.recv().await.flatten()
    }

    async fn release(&self) {
        self.place.replace(None);
        let remove = |volumes: &PodVolumes| volumes.remove_all().map_err(|error| error.to_string());
        if let Err(error) = self.with_volumes(remove).await {
            tracing::warn!(error, "cannot remove a volume");
        }
    }
}

fn attachment(place: &HubAttachment) -> NetworkAttachment {
    NetworkAttachment {
        interface: network::hub::INTERFACE.to_owned(),
        address: place.address,
        prefix: place.prefix,
        gateway: place.gateway,
    }
}

/// Keeps a pod's place for as long as this runs: if the hub's process ends, the next one is asked for the same place. Ends if
/// the pod has no interface any more and gets none, having said so.
async fn keep_place(
    hub: PathBuf,
    mut request: AttachRequest,
    mut place: HubAttachment,
    network: OwnedFd,
    changed: mpsc::UnboundedSender<Option<NetworkAttachment>>,
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

/// Whether a pod's network namespace has the interface that a hub gave it. If the check fails, assume so.
fn has_interface(network: &OwnedFd) -> bool {
    let has = || Ok(linux::route::Route::open()?.has(network::hub::INTERFACE));
    let network = network.try_clone();
    network
        .and_then(|network| linux::fresh::in_network(network, has))
        .unwrap_or(true)
}
