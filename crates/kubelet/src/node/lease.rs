//! The node's lease: the heartbeat by which the controller-manager knows that the node is alive.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;

use crate::api_call::{ApiCallError, call};
use crate::backoff::ExponentialBackoff;

/// The only namespace in which a node may have a lease.
const NAMESPACE: &str = "kube-node-lease";
/// Upstream's default. The node becomes unknown some time after this.
const DURATION_SECONDS: i32 = 40;
/// A quarter of the duration, as in upstream.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);
const MAX_LEASE_RETRY_DELAY: Duration = Duration::from_secs(7);

/// Renews the lease and never returns. The lease is owned by the Node with uid `node_uid`. While that is `None` the Node is
/// deleted, and the lease is not renewed: the garbage collector would delete it.
pub(crate) async fn keep_renewed(
    client: &Client,
    node: &str,
    mut node_uid: watch::Receiver<Option<String>>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    let mut backoff = ExponentialBackoff::up_to(MAX_LEASE_RETRY_DELAY);
    loop {
        let owner = node_uid.borrow_and_update().clone();
        let delay = match owner {
            None => RENEW_INTERVAL,
            Some(uid) => match renew(&leases, &lease_object(node, &uid, Timestamp::now())).await {
                Ok(()) => {
                    backoff.reset();
                    RENEW_INTERVAL
                }
                Err(error) => {
                    tracing::warn!(
                        node,
                        error = &error as &dyn std::error::Error,
                        "cannot renew node lease"
                    );
                    backoff.next_delay()
                }
            },
        };
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            Ok(()) = node_uid.changed() => {}
        }
    }
}

/// Deletes the lease. The garbage collector does this too once the Node is deleted, but later.
pub(crate) async fn delete(client: &Client, node: &str) -> Result<(), ApiCallError> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    match call(leases.delete(node, &DeleteParams::default())).await {
        Err(error) if error.code() != Some(404) => Err(error),
        _ => Ok(()),
    }
}

/// Writes the lease in one request, or in two if it does not exist yet. Only this kubelet writes it, so no resourceVersion is compared.
async fn renew(leases: &Api<Lease>, lease: &Lease) -> Result<(), ApiCallError> {
    let name = lease.metadata.name.as_deref().unwrap_or_default();
    match call(leases.patch(name, &PatchParams::default(), &Patch::Merge(lease))).await {
        Err(error) if error.code() == Some(404) => {
            call(leases.create(&PostParams::default(), lease))
                .await
                .map(|_| ())
        }
        patched => patched.map(|_| ()),
    }
}

fn lease_object(node: &str, node_uid: &str, now: Timestamp) -> Lease {
    Lease {
        metadata: ObjectMeta {
            name: Some(node.to_owned()),
            namespace: Some(NAMESPACE.to_owned()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.to_owned(),
                uid: node_uid.to_owned(),
                ..Default::default()
            }]),
            ..Default::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(node.to_owned()),
            lease_duration_seconds: Some(DURATION_SECONDS),
            renew_time: Some(MicroTime(now)),
            ..Default::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_lease() {
        insta::assert_json_snapshot!(lease_object("node1", "0f1e", Timestamp::UNIX_EPOCH));
    }
}
