//! The interface between the container runtime and the images, volumes and network of the node.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use pod_protocol::Problem;
use serde::{Deserialize, Serialize};

use crate::container_runtime::{ImageRequest, PodImage};

/// Provides a pod with images, volumes and a network. All on one thread, so futures need not be `Send`.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait NodeServices: 'static {
    /// Makes an image available, unpacked.
    async fn ensure_image(
        &self,
        request: &ImageRequest,
        credentials: &[serde_json::Value],
    ) -> Result<PodImage, Problem>;

    /// Sets up a volume, or updates the content of one that is set up already. `credentials` are for image volumes.
    async fn set_up_volume(
        &self,
        name: &str,
        source: &serde_json::Value,
        fs_group: Option<i64>,
        credentials: &[serde_json::Value],
    ) -> Result<ReadyVolume, Problem>;

    /// Attaches a network namespace to the pod network, until [`NodeServices::release`] or the end of this process.
    async fn attach_network(&self, network: OwnedFd) -> Result<NetworkAttachment, Problem>;

    /// Waits until the pod's interface was replaced, and returns its configuration; `None` if the pod has lost its address.
    async fn network_reattached(&self) -> Option<NetworkAttachment> {
        std::future::pending().await
    }

    /// Removes the pod's volumes and network attachment.
    async fn release(&self);
}

/// A volume that is ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadyVolume {
    /// A directory or file of this machine.
    Directory {
        /// Its path.
        path: PathBuf,
        /// All mounts of it are read-only.
        read_only: bool,
    },
    /// The layers of an image, the lowest first.
    Layers(Vec<PathBuf>),
}

/// An interface of the pod network, and the configuration to apply to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkAttachment {
    /// The interface's name in the pod's network namespace.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
    /// The length of the node network's prefix.
    pub prefix: u8,
    /// The default gateway.
    pub gateway: IpAddr,
}
