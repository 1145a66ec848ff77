//! Probes: asking a container how it is.
//!
//! [`check`] asks once, [`worker`] asks again and again and tells when the answer has changed for good.

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

use crate::seams::Runtime;

/// What one question brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is well.
    Success,
    /// It is well, but people should hear of this.
    Warning(String),
    /// It is not.
    Failure(String),
    /// It could not be asked; the answer does not count.
    Error(String),
}

impl Outcome {
    /// What upstream's metrics call it.
    fn word(&self) -> &'static str {
        match self {
            Self::Success => "successful",
            Self::Warning(_) => "warning",
            Self::Failure(_) => "failed",
            Self::Error(_) => "unknown",
        }
    }
}

/// Whom to ask.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The container.
    pub container: Container,
    /// The id of its present run.
    pub id: String,
    /// The pod's address.
    pub ip: Option<IpAddr>,
}

/// Asks once.
pub async fn check<R: Runtime>(runtime: &R, subject: &Subject, probe: &Probe) -> Outcome {
    let timeout = Duration::from_secs(at_least_one(probe.timeout_seconds, 1));
    if let Some(action) = &probe.exec {
        exec::check(runtime, subject, action, timeout).await
    } else if let Some(action) = &probe.http_get {
        http::check(runtime, subject, action, timeout).await
    } else if let Some(action) = &probe.tcp_socket {
        tcp::check(runtime, subject, action, timeout).await
    } else if let Some(action) = &probe.grpc {
        grpc::check(runtime, subject, action, timeout).await
    } else {
        Outcome::Error(format!(
            "missing probe handler for {}",
            subject.container.name
        ))
    }
}

/// A number of a probe, which is a default where it is missing and 1 where it makes no sense.
pub(crate) fn at_least_one(value: Option<i32>, default: u64) -> u64 {
    value.map_or(default, |value| u64::try_from(value).unwrap_or(1).max(1))
}
