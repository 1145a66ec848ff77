//! Startup, liveness and readiness probes.
//!
//! [`probe_once`] runs a probe once; [`worker`] runs it periodically and applies the thresholds.

pub mod exec;
pub mod grpc;
pub mod http;
pub mod target;
pub mod tcp;
mod tls;
pub mod worker;

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Probe};

use crate::container_runtime::ContainerRuntime;

/// The result of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    /// The container is healthy.
    Success,
    /// The container is healthy, but the message is worth an Event.
    Warning(String),
    /// The container is not healthy.
    Failure(String),
    /// The probe could not run; the result does not count.
    Unknown(String),
}

impl ProbeResult {
    /// The label in upstream's metrics.
    fn metric_label(&self) -> &'static str {
        match self {
            Self::Success => "successful",
            Self::Warning(_) => "warning",
            Self::Failure(_) => "failed",
            Self::Unknown(_) => "unknown",
        }
    }
}

/// A container to probe.
#[derive(Clone, Debug)]
pub struct ProbedContainer {
    /// Its spec.
    pub spec: Container,
    /// Its id.
    pub id: String,
    /// The pod's address.
    pub ip: Option<IpAddr>,
}

/// Runs the HTTP connection of a probe in a task of its own.
fn spawn_connection(connection: impl Future<Output = hyper::Result<()>> + 'static) {
    tokio::task::spawn_local(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "connection of a probe failed");
        }
    });
}

/// Runs a probe once.
pub async fn probe_once<R: ContainerRuntime>(
    runtime: &R,
    container: &ProbedContainer,
    probe: &Probe,
) -> ProbeResult {
    let timeout = Duration::from_secs(at_least_one(probe.timeout_seconds, 1));
    if let Some(action) = &probe.exec {
        exec::probe(runtime, container, action, timeout).await
    } else if let Some(action) = &probe.http_get {
        http::probe(runtime, container, action, timeout).await
    } else if let Some(action) = &probe.tcp_socket {
        tcp::probe(runtime, container, action, timeout).await
    } else if let Some(action) = &probe.grpc {
        grpc::probe(runtime, container, action, timeout).await
    } else {
        ProbeResult::Unknown(format!("missing probe handler for {}", container.spec.name))
    }
}

/// A numeric field of a probe: `default` if it is missing, 1 if it is less than 1.
pub(crate) fn at_least_one(value: Option<i32>, default: u64) -> u64 {
    value.map_or(default, |value| u64::try_from(value).unwrap_or(1).max(1))
}
