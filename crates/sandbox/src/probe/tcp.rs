//! A port that can be connected to.

use std::time::Duration;

use k8s_openapi::api::core::v1::TCPSocketAction;
use tokio::time::timeout;

use super::target::{self, Address};
use super::{Outcome, Subject};
use crate::life::go_duration;
use crate::seams::Runtime;

/// Asks once.
pub async fn check<R: Runtime>(
    runtime: &R,
    subject: &Subject,
    action: &TCPSocketAction,
    limit: Duration,
) -> Outcome {
    let port = match target::port(&action.port, &subject.container) {
        Ok(port) => port,
        Err(error) => return Outcome::Error(error),
    };
    let address = Address::new(action.host.as_deref(), subject.ip, port);
    match timeout(limit, address.connect(runtime)).await {
        Ok(Ok(_)) => Outcome::Success,
        Ok(Err(error)) => Outcome::Failure(error),
        Err(_) => Outcome::Failure(format!(
            "dial tcp {address}: i/o timeout after {}",
            go_duration(limit)
        )),
    }
}
