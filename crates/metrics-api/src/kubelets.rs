//! The cluster, as this API asks for it: summaries of kubelets, and the labels of what they tell of.

use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client};
use kubelet_api::stats::summary::StatsSummary;

/// A kubelet that takes longer is left out.
const PATIENCE: Duration = Duration::from_secs(8);

/// What is asked of the cluster: the seam at which tests stand in for it.
pub(crate) trait Source: Send + Sync + 'static {
    /// The newest figures of all nodes that answer.
    fn summaries(&self) -> BoxFuture<'_, Vec<StatsSummary>>;

    /// The names and labels of nodes, chosen as the API server understands it.
    fn nodes(&self, chosen: Chosen) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>>;

    /// The same of pods, of one namespace or of all.
    fn pods(
        &self,
        namespace: Option<String>,
        chosen: Chosen,
    ) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>>;
}

/// Which objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub labels: Option<String>,
    pub fields: Option<String>,
}

impl From<Chosen> for ListParams {
    fn from(chosen: Chosen) -> Self {
        Self {
            label_selector: chosen.labels,
            field_selector: chosen.fields,
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

impl Source for Kubelets {
    fn summaries(&self) -> BoxFuture<'_, Vec<StatsSummary>> {
        async move {
            let nodes = match self.nodes(Chosen::default()).await {
                Ok(nodes) => nodes,
                Err(error) => {
                    tracing::warn!(%error, "cannot list nodes to ask what they use");
                    return Vec::new();
                }
            };
            let names = nodes.into_iter().filter_map(|node| node.name);
            let asked = names.map(|name| async move {
                match tokio::time::timeout(PATIENCE, self.summary(&name)).await {
                    Ok(Ok(summary)) => Some(summary),
                    Ok(Err(error)) => {
                        tracing::debug!(node = name, %error, "a kubelet does not tell what it uses");
                        None
                    }
                    Err(_) => {
                        tracing::debug!(node = name, "a kubelet takes too long");
                        None
                    }
                }
            });
            join_all(asked).await.into_iter().flatten().collect()
        }
        .boxed()
    }

    fn nodes(&self, chosen: Chosen) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
        async move {
            let nodes: Api<Node> = Api::all(self.client.clone());
            let list = nodes.list_metadata(&chosen.into()).await?;
            Ok(list.items.into_iter().map(|node| node.metadata).collect())
        }
        .boxed()
    }

    fn pods(
        &self,
        namespace: Option<String>,
        chosen: Chosen,
    ) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
        async move {
            let pods: Api<Pod> = match namespace {
                Some(namespace) => Api::namespaced(self.client.clone(), &namespace),
                None => Api::all(self.client.clone()),
            };
            let list = pods.list_metadata(&chosen.into()).await?;
            Ok(list.items.into_iter().map(|pod| pod.metadata).collect())
        }
        .boxed()
    }
}
