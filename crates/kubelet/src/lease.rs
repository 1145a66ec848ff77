//! The node's lease: the cheap heartbeat by which the controller-manager knows that this node lives.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;

use crate::api::{CallError, call};
use crate::backoff::Doubling;

/// The only namespace in which a node may have a lease.
const NAMESPACE: &str = "kube-node-lease";
/// Upstream's default: the node counts as lost some time after this.
const DURATION_SECONDS: i32 = 40;
/// A quarter of the duration, as upstream.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);
/// A lease that can't be renewed is tried again at least this often.
const RETRY_AT_MOST: Duration = Duration::from_secs(7);

/// Renews the lease for ever, owned by the Node whose uid `presence` holds, and not while there is none:
/// the garbage collector would only remove it again.
pub(crate) async fn keep_renewed(
    client: &Client,
    node: &str,
    mut presence: watch::Receiver<Option<String>>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    let mut backoff = Doubling::up_to(RETRY_AT_MOST);
    loop {
        let owner = presence.borrow_and_update().clone();
        let wait = match owner {
            None => RENEW_INTERVAL,
            Some(uid) => match renew(&leases, &lease_object(node, &uid, Timestamp::now())).await {
                Ok(()) => {
                    backoff.restart();
                    RENEW_INTERVAL
                }
                Err(error) => {
                    tracing::warn!(
                        node,
                        error = &error as &dyn std::error::Error,
                        "could not renew the node's lease"
                    );
                    backoff.wait()
                }
            },
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            Ok(()) = presence.changed() => {}
        }
    }
}

/// Deletes the lease; also done by the garbage collector once the Node is gone, but later.
pub(crate) async fn delete(client: &Client, node: &str) -> Result<(), CallError> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    match call(leases.delete(node, &DeleteParams::default())).await {
        Err(error) if error.code() != Some(404) => Err(error),
        _ => Ok(()),
    }
}

/// Writes the lease in one request, two if it has to be created. Nobody else writes it, so no version is compared.
async fn renew(leases: &Api<Lease>, lease: &Lease) -> Result<(), CallError> {
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
    fn the_lease_as_written() {
        insta::assert_json_snapshot!(lease_object("node1", "0f1e", Timestamp::UNIX_EPOCH));
    }
}
