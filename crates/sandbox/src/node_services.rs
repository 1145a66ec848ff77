//! The interface between the container runtime and the node: images, volumes and the pod network. Other crates implement
//! these, and the binary connects them.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use pod_protocol::Problem;
use serde::{Deserialize, Serialize};

use crate::container_runtime::{ImageProblem, ImageRequest, PodImage};

/// Provides one pod with images, volumes and a network.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait NodeServices: 'static {
    /// The node's addresses, at most one per family, the preferred one first.
    fn host_ips(&self) -> Vec<IpAddr>;

    /// Ensures that an image is present and unpacked.
    async fn ensure_image(
        &self,
        request: &ImageRequest,
        credentials: &[serde_json::Value],
    ) -> Result<PodImage, ImageProblem>;

    /// Creates a volume that is not an image volume, or updates the content of an existing one.
    async fn set_up_volume(
        &self,
        name: &str,
        source: &serde_json::Value,
        fs_group: Option<i64>,
    ) -> Result<ReadyVolume, Problem>;

    /// Attaches a network namespace to the pod network, until [`NodeServices::release`] or the end of this process.
    async fn attach_network(&self, network: OwnedFd) -> io::Result<NetworkAttachment>;

    /// Waits until the pod's interface was recreated, and returns its configuration; `None` if the pod has lost its
    /// attachment.
    async fn network_reattached(&self) -> Option<NetworkAttachment> {
        std::future::pending().await
    }

    /// Removes the pod's volumes and its network attachment. Errors are logged.
    async fn release(&self);
}

/// A volume that is ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadyVolume {
    /// A directory or file on the host.
    Directory {
        /// Its path.
        path: PathBuf,
        /// Read-only for all containers.
        read_only: bool,
    },
    /// The layers of an image, the lowest first.
    Layers(Vec<PathBuf>),
}

/// An attachment to the pod network. The interface exists, and has to be configured with this address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkAttachment {
    /// Name of the interface in the pod's network namespace.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
    /// The default gateway, which need not be in the address's network.
    pub gateway: IpAddr,
}
