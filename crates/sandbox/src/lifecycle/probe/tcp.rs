//! TCP probes.

use std::time::Duration;

use k8s_openapi::api::core::v1::TCPSocketAction;
use pod_protocol::go_duration;
use tokio::time::timeout;

use super::target::{self, TargetAddress};
use super::{ProbeResult, ProbedContainer};
use crate::container_runtime::ContainerRuntime;

/// Connects to the port.
pub async fn probe<R: ContainerRuntime>(
    runtime: &R,
    container: &ProbedContainer,
    action: &TCPSocketAction,
    limit: Duration,
) -> ProbeResult {
    let port = match target::port(&action.port, &container.spec) {
        Ok(port) => port,
        Err(error) => return ProbeResult::Unknown(error),
    };
    let address = TargetAddress::new(action.host.as_deref(), container.ip, port);
    match timeout(limit, address.connect(runtime)).await {
        Ok(Ok(_)) => ProbeResult::Success,
        Ok(Err(error)) => ProbeResult::Failure(error),
        Err(_) => ProbeResult::Failure(format!(
            "dial tcp {address}: i/o timeout after {}",
            go_duration(limit)
        )),
    }
}
