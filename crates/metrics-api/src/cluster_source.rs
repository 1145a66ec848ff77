//! Reads from the cluster: stats summaries of kubelets, and metadata of nodes and pods.

use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client};
use kubelet_api::stats::summary::StatsSummary;

/// Time limit for the summary of one kubelet.
const SUMMARY_TIMEOUT: Duration = Duration::from_secs(8);

/// The data that the handlers read from the cluster. Tests have their own implementation.
pub(crate) trait ClusterSource: Send + Sync + 'static {
    /// The stats summaries of all kubelets that respond in time.
    fn summaries(&self) -> BoxFuture<'_, Vec<StatsSummary>>;

    /// The metadata of the selected nodes.
    fn nodes(&self, selectors: Selectors) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>>;

    /// The metadata of the selected pods, in one namespace or in all.
    fn pods(
        &self,
        namespace: Option<String>,
        selectors: Selectors,
    ) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>>;
}

/// Label and field selectors, in the API server's syntax.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selectors {
    pub labels: Option<String>,
    pub fields: Option<String>,
}

impl From<Selectors> for ListParams {
    fn from(selectors: Selectors) -> Self {
        Self {
            label_selector: selectors.labels,
            field_selector: selectors.fields,
            ..Self::default()
        }
    }
}

/// The kubelets of a cluster, reached through its API server.
pub struct Kubelets {
    client: Client,
}

impl Kubelets {
    /// `client` must be allowed to list nodes and pods, and to use `nodes/proxy`.
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    async fn summary(
        &self,
        node: &str,
    ) -> Result<StatsSummary, Box<dyn std::error::Error + Send + Sync>> {
        let path = format!("/api/v1/nodes/{node}/proxy/stats/summary?only_cpu_and_memory=true");
        let request = http::Request::get(path).body(Vec::new())?;
        let text = self.client.request_text(request).await?;
        Ok(serde_json::from_str(&text)?)
    }
}

impl ClusterSource for Kubelets {
    fn summaries(&self) -> BoxFuture<'_, Vec<StatsSummary>> {
        async move {
            let nodes = match self.nodes(Selectors::default()).await {
                Ok(nodes) => nodes,
                Err(error) => {
                    tracing::warn!(%error, "cannot list nodes");
                    return Vec::new();
                }
            };
            let names = nodes.into_iter().filter_map(|node| node.name);
            let requests = names.map(|name| async move {
                match tokio::time::timeout(SUMMARY_TIMEOUT, self.summary(&name)).await {
                    Ok(Ok(summary)) => Some(summary),
                    Ok(Err(error)) => {
                        tracing::debug!(node = name, %error, "cannot read stats summary of kubelet");
                        None
                    }
                    Err(_) => {
                        tracing::debug!(node = name, "stats summary of kubelet timed out");
                        None
                    }
                }
            });
            join_all(requests).await.into_iter().flatten().collect()
        }
        .boxed()
    }

    fn nodes(&self, selectors: Selectors) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
        async move {
            let nodes: Api<Node> = Api::all(self.client.clone());
            let list = nodes.list_metadata(&selectors.into()).await?;
            Ok(list.items.into_iter().map(|node| node.metadata).collect())
        }
        .boxed()
    }

    fn pods(
        &self,
        namespace: Option<String>,
        selectors: Selectors,
    ) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
        async move {
            let pods: Api<Pod> = match namespace {
                Some(namespace) => Api::namespaced(self.client.clone(), &namespace),
                None => Api::all(self.client.clone()),
            };
            let list = pods.list_metadata(&selectors.into()).await?;
            Ok(list.items.into_iter().map(|pod| pod.metadata).collect())
        }
        .boxed()
    }
}
