//! The services of this node for a pod: images, volumes and network attachments, implemented by other crates.

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use images::puller::{HeldImageError, HeldImages, ImagePuller, PullFailure};
use images::{LocalImage, PullPolicy, PullRequest};
use network::hub::{ATTACH_TIMEOUT, AttachRequest, HubAttachment};
use pod_protocol::Problem;
use sandbox::container_runtime::{
    ImageDefaults, ImageProblem, ImageProblemReason, ImagePullPolicy, ImageRequest, PodImage,
};
use sandbox::node_services::{NetworkAttachment, NodeServices, ReadyVolume};
use sandbox::runtime::PodDirs;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use volumes::{PodVolumes, VolumeSource};

use super::SandboxConfig;
use crate::node_dir;
use crate::settings::image_limits;

/// The services of this node for one pod.
pub struct LocalNodeServices {
    images: HeldImages,
    host_ips: Vec<IpAddr>,
    uid: String,
    hub_socket: PathBuf,
    /// The mutex makes `release` wait for a set-up that still runs when the pod terminates.
    volumes: Arc<Mutex<PodVolumes>>,
    /// The task that keeps the connection to the hub, and reattaches the pod if the connection is lost.
    attachment_task: RefCell<Option<AbortOnDropHandle<()>>>,
    /// Changes of the attachment: a new interface, or `None` if it was lost.
    changes: (
        mpsc::UnboundedSender<Option<NetworkAttachment>>,
        tokio::sync::Mutex<mpsc::UnboundedReceiver<Option<NetworkAttachment>>>,
    ),
}

impl LocalNodeServices {
    /// The services of the node on which `config` places the sandbox.
    pub fn new(config: &SandboxConfig, pod_dirs: &PodDirs, puller: ImagePuller) -> Self {
        let (changed, changes) = mpsc::unbounded_channel();
        Self {
            images: HeldImages::new(
                puller,
                config.store.clone(),
                node_dir::layers(&config.node_dir),
            ),
            changes: (changed, tokio::sync::Mutex::new(changes)),
            host_ips: config.host_ips.clone(),
            uid: config.uid.clone(),
            hub_socket: node_dir::hub_sockets(&config.node_dir).outside,
            volumes: Arc::new(Mutex::new(PodVolumes::new(
                pod_dirs.disk.join("volumes"),
                pod_dirs.memory.join("volumes"),
            ))),
            attachment_task: RefCell::new(None),
        }
    }

    /// Runs `work` on a blocking thread: volumes that are large or on slow servers take minutes, and all tasks of the sandbox share
    /// one thread.
    async fn with_volumes<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PodVolumes) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let volumes = Arc::clone(&self.volumes);
        let work = move || work(&volumes.lock().unwrap());
        let result = tokio::task::spawn_blocking(work).await;
        result.map_err(|error| error.to_string()).flatten()
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
        let request = PullRequest {
            reference: request.reference.clone(),
            policy: match request.policy {
                ImagePullPolicy::Always => PullPolicy::Always,
                ImagePullPolicy::IfNotPresent => PullPolicy::IfNotPresent,
                ImagePullPolicy::Never => PullPolicy::Never,
            },
            credentials: credentials
                .iter()
                .filter_map(|credential| serde_json::from_value(credential.clone()).ok())
                .collect(),
        };
        let limits = image_limits::from_environment().map_err(|error| ImageProblem {
            reason: ImageProblemReason::ErrImagePull,
            message: format!("{error:#}"),
        })?;
        match self.images.ensure(request, limits).await {
            Ok(image) => Ok(pod_image(image)),
            Err(HeldImageError::Failed(PullFailure { reason, message })) => {
                let reason = ImageProblemReason::parse(&reason);
                Err(ImageProblem { reason, message })
            }
            Err(HeldImageError::NoForkServer) => {
                // Only a new sandbox can fork non-dumpable processes for pulls. The kubelet starts one, which then
                // follows the pod's restart policy.
                tracing::error!(
                    "the sandbox exits: all of its fork servers for image pulls were killed"
                );
                std::process::exit(1);
            }
        }
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
        // The caller retries, and reports each failure with the reason FailedCreatePodSandBox.
        let attached = HubAttachment::request(&self.hub_socket, &request, &network, ATTACH_TIMEOUT);
        let hub_attachment = attached.await?;
        let attachment = attachment(&hub_attachment);
        let (hub_socket, changes) = (self.hub_socket.clone(), self.changes.0.clone());
        let task = tokio::task::spawn_local(async move {
            let changed = |changed: Option<&HubAttachment>| {
                let _ = changes.send(changed.map(self::attachment));
            };
            hub_attachment
                .keep(&hub_socket, request, &network, changed)
                .await;
        });
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

fn pod_image(image: LocalImage) -> PodImage {
    let config = image.config;
    PodImage {
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
    }
}

fn attachment(hub_attachment: &HubAttachment) -> NetworkAttachment {
    NetworkAttachment {
        interface: network::hub::INTERFACE.to_owned(),
        address: hub_attachment.address,
        gateway: hub_attachment.gateway,
    }
}
