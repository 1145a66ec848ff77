//! `metrics.k8s.io` of a cluster: served by the leader, for `kubectl top` and autoscalers.
//!
//! As with every aggregated API, the API server finds it by a Service and its endpoint. The Service has no cluster IP: only the API
//! server may connect.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use control_plane::ClusterPki;
use control_plane::pki::{CertificateSubject, CertificateUsage, FRONT_PROXY_CLIENT};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use metrics_api::{GROUP, Kubelets, MetricsServerIdentity, VERSION};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

/// The name of the Service.
const SERVICE_NAME: &str = "coracle-metrics";
const NAMESPACE: &str = "kube-system";
/// Retry interval for writing the objects.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The running server of `metrics.k8s.io`; dropping it stops the server.
pub struct MetricsServer {
    _task: AbortOnDropHandle<()>,
}

/// Starts the server on an address of this host, and registers it with the API server in the background.
pub async fn start(
    client: Client,
    pki: &ClusterPki,
    host: IpAddr,
) -> anyhow::Result<MetricsServer> {
    let listener = TcpListener::bind((host, 0))
        .await
        .context("cannot open the metrics API's port")?;
    let address = listener.local_addr()?;
    let names = vec![format!("{SERVICE_NAME}.{NAMESPACE}.svc"), host.to_string()];
    let server = pki.cluster.issue(
        &CertificateSubject::server(SERVICE_NAME, names),
        CertificateUsage::Server,
    )?;
    let identity = MetricsServerIdentity {
        cert_pem: server.cert_pem,
        key_pem: server.key_pem,
        client_ca_pem: pki.front_proxy.cert_pem().to_owned(),
        client_name: FRONT_PROXY_CLIENT.to_owned(),
    };
    let ca = pki.cluster.cert_pem().to_owned();
    let task = tokio::spawn(async move {
        let served = metrics_api::serve(listener, identity, Kubelets::new(client.clone()));
        let registered = async {
            register(&client, &ca, address).await;
            std::future::pending::<()>().await
        };
        tokio::select! {
            ended = served => if let Err(error) = ended {
                tracing::warn!(error = &error as &dyn std::error::Error, "metrics.k8s.io is not served");
            },
            () = registered => {}
        }
    });
    Ok(MetricsServer {
        _task: AbortOnDropHandle::new(task),
    })
}

/// Writes the objects by which the API server finds this server. Retries until that succeeds.
async fn register(client: &Client, ca: &str, address: SocketAddr) {
    while let Err(error) = apply(client, ca, address).await {
        tracing::debug!(%error, "cannot register metrics.k8s.io yet");
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

async fn apply(client: &Client, ca: &str, address: SocketAddr) -> kube::Result<()> {
    let as_coracle = PatchParams::apply("coracle").force();
    let services: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let api_services: Api<APIService> = Api::all(client.clone());
    let (service, slice, role) = (service(), endpoints(address), reader_role());
    tokio::try_join!(
        async {
            services
                .patch(SERVICE_NAME, &as_coracle, &Patch::Apply(&service))
                .await
                .map(drop)
        },
        async {
            slices
                .patch(SERVICE_NAME, &as_coracle, &Patch::Apply(&slice))
                .await
                .map(drop)
        },
        async {
            roles
                .patch(READER_ROLE, &as_coracle, &Patch::Apply(&role))
                .await
                .map(drop)
        },
    )?;
    // Last, because the API server connects as soon as it is registered.
    let name = format!("{VERSION}.{GROUP}");
    let registration = registration(ca);
    api_services
        .patch(&name, &as_coracle, &Patch::Apply(&registration))
        .await?;
    Ok(())
}

/// Upstream metrics-server's ClusterRole: all users with view access may read metrics.
const READER_ROLE: &str = "system:aggregated-metrics-reader";

fn reader_role() -> Value {
    let to = |role: &str| {
        (
            format!("rbac.authorization.k8s.io/aggregate-to-{role}"),
            json!("true"),
        )
    };
    let labels: serde_json::Map<String, Value> =
        ["admin", "edit", "view"].map(to).into_iter().collect();
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": READER_ROLE, "labels": labels},
        "rules": [{"apiGroups": [GROUP], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]}],
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE_NAME},
        "spec": {"clusterIP": "None", "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]},
    })
}

fn endpoints(address: SocketAddr) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": SERVICE_NAME, "labels": {
            "kubernetes.io/service-name": SERVICE_NAME,
            "endpointslice.kubernetes.io/managed-by": "coracle",
        }},
        "addressType": if address.is_ipv4() { "IPv4" } else { "IPv6" },
        "endpoints": [{"addresses": [address.ip()], "conditions": {"ready": true}}],
        "ports": [{"name": "https", "port": address.port(), "protocol": "TCP"}],
    })
}

fn registration(ca: &str) -> Value {
    json!({
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": format!("{VERSION}.{GROUP}")},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {"name": SERVICE_NAME, "namespace": NAMESPACE, "port": 443},
            "caBundle": ByteString(ca.as_bytes().to_vec()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_that_register_the_api() {
        let address = "10.0.0.1:34567".parse().unwrap();
        let objects = [
            service(),
            endpoints(address),
            reader_role(),
            registration("PEM"),
        ];
        insta::assert_json_snapshot!(objects);
    }
}
