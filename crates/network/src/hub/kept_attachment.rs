//! Keeps a pod's network attachment while hubs are restarted.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::{AttachRequest, HubAttachment, INTERFACE};

/// How long the hub may take to respond, if no deadline is nearer.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(20);
/// Retry interval of claiming the pod's address from a restarted hub.
const CLAIM_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long a pod may be without a network interface before its attachment is lost. A new hub takes about a second.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);

impl HubAttachment {
    /// Keeps the attachment for as long as this future runs: if the hub's process exits, claims the same address from the next one at
    /// `socket`. Calls `changed` when the pod has got a new interface. Calls it with `None`, and returns, if the pod has lost its interface
    /// and gets no new one in time.
    pub async fn keep(
        mut self,
        socket: &Path,
        mut request: AttachRequest,
        namespace: &OwnedFd,
        changed: impl Fn(Option<&HubAttachment>),
    ) {
        request.claim = Some(self.address);
        loop {
            self.hub_exited().await;
            match claim(socket, &request, namespace).await {
                Some(attachment) => self = attachment,
                None => return changed(None),
            }
            if self.is_new {
                changed(Some(&self));
            }
        }
    }
}

/// Claims a pod's address from a restarted hub; `None` if the pod has lost its interface and gets no new one in time.
async fn claim(
    socket: &Path,
    request: &AttachRequest,
    namespace: &OwnedFd,
) -> Option<HubAttachment> {
    let deadline = Instant::now() + CLAIM_TIMEOUT;
    loop {
        // A hub that hangs must not keep the pod waiting without an interface.
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = if left.is_zero() { ATTACH_TIMEOUT } else { left };
        match HubAttachment::request(socket, request, namespace, timeout).await {
            Ok(attachment) => return Some(attachment),
            Err(error) if Instant::now() >= deadline && !has_interface(namespace) => {
                tracing::warn!(%error, "the pod has lost its network");
                return None;
            }
            Err(error) => tracing::debug!(%error, "cannot claim the pod's address yet"),
        }
        tokio::time::sleep(CLAIM_RETRY_INTERVAL).await;
    }
}

/// Whether the pod's network namespace still has the interface from the hub. If the check fails, assume that it does.
fn has_interface(namespace: &OwnedFd) -> bool {
    let has = || Ok(linux::route::RouteSocket::open()?.has_interface(INTERFACE));
    let namespace = namespace.try_clone();
    namespace
        .and_then(|namespace| linux::setns::run_in_network_namespace(namespace, has))
        .unwrap_or(true)
}
