//! The router, and the handlers of the resources `nodes` and `pods`.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};

use crate::cluster_source::{ClusterSource, Selectors};
use crate::discovery;
use crate::rates::{PodMetrics, ResourceUsage};
use crate::usage_cache::UsageCache;
use crate::{GROUP, VERSION};

pub(crate) fn router<S: ClusterSource>(cache: Arc<UsageCache<S>>) -> Router {
    let below = |path: &str| format!("/apis/{GROUP}/{VERSION}{path}");
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/apis", get(discovery::groups))
        .route(&format!("/apis/{GROUP}"), get(discovery::group))
        .route(&below(""), get(discovery::resources))
        .route("/openapi/v2", get(discovery::openapi_v2))
        .route("/openapi/v3", get(discovery::openapi_v3))
        .route(&below("/nodes"), get(list_nodes::<S>))
        .route(&below("/nodes/{name}"), get(get_node::<S>))
        .route(&below("/pods"), get(list_pods::<S>))
        .route(
            &below("/namespaces/{namespace}/pods"),
            get(list_namespace::<S>),
        )
        .route(
            &below("/namespaces/{namespace}/pods/{name}"),
            get(get_pod::<S>),
        )
        .fallback(|| async {
            status(
                StatusCode::NOT_FOUND,
                "the server could not find the requested resource",
            )
        })
        .with_state(cache)
}

type CacheState<S> = State<Arc<UsageCache<S>>>;

async fn list_nodes<S: ClusterSource>(
    State(cache): CacheState<S>,
    RawQuery(query): RawQuery,
) -> Response {
    let found = cache.source().nodes(parse_selectors(query)).await;
    match found {
        Ok(nodes) => {
            let usage = cache.usage().await;
            let items = nodes.iter().filter_map(|meta| {
                let node_usage = usage.nodes.get(meta.name.as_deref()?)?;
                Some(node(meta, node_usage))
            });
            list("NodeMetricsList", items.collect())
        }
        Err(error) => error_response(error),
    }
}

async fn get_node<S: ClusterSource>(
    State(cache): CacheState<S>,
    Path(name): Path<String>,
) -> Response {
    match cache.source().nodes(select_name(&name)).await {
        Ok(nodes) => {
            let usage = cache.usage().await;
            let node_usage = usage.nodes.get(&name);
            match nodes.first().zip(node_usage) {
                Some((meta, node_usage)) => Json(node(meta, node_usage)).into_response(),
                None => not_found("nodes", &name),
            }
        }
        Err(error) => error_response(error),
    }
}

async fn list_pods<S: ClusterSource>(
    State(cache): CacheState<S>,
    RawQuery(query): RawQuery,
) -> Response {
    pods(&cache, None, parse_selectors(query)).await
}

async fn list_namespace<S: ClusterSource>(
    State(cache): CacheState<S>,
    Path(namespace): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    pods(&cache, Some(namespace), parse_selectors(query)).await
}

async fn get_pod<S: ClusterSource>(
    State(cache): CacheState<S>,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    match find_pods(&cache, Some(namespace), select_name(&name)).await {
        Ok(found) => match found.into_iter().next() {
            Some(found) => Json(found).into_response(),
            None => not_found("pods", &name),
        },
        Err(error) => error_response(error),
    }
}

async fn pods<S: ClusterSource>(
    cache: &UsageCache<S>,
    namespace: Option<String>,
    selectors: Selectors,
) -> Response {
    match find_pods(cache, namespace, selectors).await {
        Ok(items) => list("PodMetricsList", items),
        Err(error) => error_response(error),
    }
}

async fn find_pods<S: ClusterSource>(
    cache: &UsageCache<S>,
    namespace: Option<String>,
    selectors: Selectors,
) -> kube::Result<Vec<Value>> {
    let found = cache.source().pods(namespace, selectors).await?;
    if found.is_empty() {
        // No need to query the kubelets.
        return Ok(Vec::new());
    }
    let usage = cache.usage().await;
    let by_uid: HashMap<&str, &PodMetrics> = usage
        .pods
        .iter()
        .map(|pod| (pod.uid.as_str(), pod))
        .collect();
    let items = found.iter().filter_map(|meta| {
        let pod_usage = by_uid.get(meta.uid.as_deref()?)?;
        Some(pod(meta, pod_usage))
    });
    Ok(items.collect())
}

fn node(meta: &ObjectMeta, usage: &ResourceUsage) -> Value {
    json!({
        "kind": "NodeMetrics",
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "metadata": metadata(meta, usage),
        "timestamp": Time(usage.at),
        "window": window(usage),
        "usage": amounts(usage),
    })
}

fn pod(meta: &ObjectMeta, pod: &PodMetrics) -> Value {
    // Containers are sampled together. The shortest window is the one that all of them cover.
    let shortest = pod
        .containers
        .iter()
        .map(|(_, usage)| usage)
        .min_by(|a, b| a.window.total_cmp(&b.window));
    let containers: Vec<Value> = pod
        .containers
        .iter()
        .map(|(name, usage)| json!({"name": name, "usage": amounts(usage)}))
        .collect();
    json!({
        "kind": "PodMetrics",
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "metadata": shortest.map(|usage| metadata(meta, usage)),
        "timestamp": shortest.map(|usage| Time(usage.at)),
        "window": shortest.map(window),
        "containers": containers,
    })
}

fn metadata(meta: &ObjectMeta, usage: &ResourceUsage) -> ObjectMeta {
    ObjectMeta {
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        labels: meta.labels.clone(),
        creation_timestamp: Some(Time(usage.at)),
        ..ObjectMeta::default()
    }
}

fn amounts(usage: &ResourceUsage) -> Value {
    json!({
        "cpu": format!("{}n", usage.nano_cores),
        "memory": format!("{}Ki", usage.memory / 1024),
    })
}

/// Formats the window as a Go duration.
fn window(usage: &ResourceUsage) -> String {
    format!("{:.3}s", usage.window)
}

fn list(kind: &str, items: Vec<Value>) -> Response {
    let api_version = format!("{GROUP}/{VERSION}");
    Json(json!({"kind": kind, "apiVersion": api_version, "metadata": {}, "items": items}))
        .into_response()
}

/// Reads the selectors of a list request.
fn parse_selectors(query: Option<String>) -> Selectors {
    let mut selectors = Selectors::default();
    let query = query.unwrap_or_default();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let value = (!value.is_empty()).then(|| value.into_owned());
        match &*name {
            "labelSelector" => selectors.labels = value,
            "fieldSelector" => selectors.fields = value,
            _ => {}
        }
    }
    selectors
}

fn select_name(name: &str) -> Selectors {
    Selectors {
        labels: None,
        fields: Some(format!("metadata.name={name}")),
    }
}

/// Passes on an error of the API server, such as an invalid selector.
fn error_response(error: kube::Error) -> Response {
    match error {
        kube::Error::Api(api) => {
            let code = StatusCode::from_u16(api.code).unwrap_or(StatusCode::BAD_GATEWAY);
            status(code, &api.message)
        }
        other => status(StatusCode::SERVICE_UNAVAILABLE, &other.to_string()),
    }
}

fn not_found(resource: &str, name: &str) -> Response {
    let message = format!("{resource}.{GROUP} {name:?} not found");
    status(StatusCode::NOT_FOUND, &message)
}

fn status(code: StatusCode, message: &str) -> Response {
    let reason = match code {
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::BAD_REQUEST => "BadRequest",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
        _ => "InternalError",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {},
        "status": "Failure", "reason": reason, "code": code.as_u16(), "message": message,
    });
    (code, Json(status)).into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use axum::body::Body;
    use futures::FutureExt;
    use futures::future::BoxFuture;
    use http_body_util::BodyExt;
    use kubelet_api::stats::summary::StatsSummary;
    use tower::ServiceExt;

    use super::*;
    use crate::rates::tests::at;

    /// One node with one pod that uses half a CPU. Each sample is ten seconds after the previous one.
    #[derive(Default)]
    struct Cluster {
        samples: AtomicI64,
    }

    impl ClusterSource for Cluster {
        fn summaries(&self) -> BoxFuture<'_, Vec<StatsSummary>> {
            let sample = self.samples.fetch_add(1, Ordering::Relaxed) + 1;
            let (time, used) = (at(10 * sample), sample * 5_000_000_000);
            let cpu = json!({"time": time, "usageCoreNanoSeconds": used});
            let memory = json!({"time": time, "usageBytes": 4096, "workingSetBytes": 2048, "rssBytes": 1024,
                "pageFaults": 0, "majorPageFaults": 0});
            let summary = json!({
                "node": {"nodeName": "node1", "startTime": at(0), "cpu": cpu, "memory": memory},
                "pods": [{
                    "podRef": {"name": "web", "namespace": "default", "uid": "u1"},
                    "startTime": at(0),
                    "containers": [{"name": "main", "startTime": at(0), "cpu": cpu, "memory": memory}],
                }],
            });
            let summary = serde_json::from_value(summary).unwrap();
            async move { vec![summary] }.boxed()
        }

        fn nodes(&self, _: Selectors) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
            let meta = json!({"name": "node1", "labels": {"a": "b"}});
            async move { Ok(vec![serde_json::from_value(meta).unwrap()]) }.boxed()
        }

        fn pods(
            &self,
            namespace: Option<String>,
            selectors: Selectors,
        ) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
            let fits = namespace.is_none_or(|namespace| namespace == "default")
                && selectors.labels.is_none_or(|labels| labels == "app=web");
            let meta = json!({"name": "web", "namespace": "default", "uid": "u1", "labels": {"app": "web"}});
            let found = fits.then(|| serde_json::from_value(meta).unwrap());
            async move { Ok(found.into_iter().collect()) }.boxed()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn serves_lists_and_single_objects() {
        let cache = Arc::new(UsageCache::new(Cluster::default()));
        let router = router(cache.clone());
        let get = async |path: &str| {
            let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            let code = response.status();
            let text = response.into_body().collect().await.unwrap().to_bytes();
            (code, serde_json::from_slice::<Value>(&text).unwrap())
        };
        let base = "/apis/metrics.k8s.io/v1beta1";
        let (_, resources) = get(base).await;
        assert_eq!(resources["resources"][1]["kind"], "PodMetrics");
        let (_, nodes) = get(&format!("{base}/nodes")).await;
        insta::assert_json_snapshot!(nodes["items"][0]);
        let (_, pods) = get(&format!(
            "{base}/namespaces/default/pods?labelSelector=app%3Dweb"
        ))
        .await;
        insta::assert_json_snapshot!(pods["items"][0]);
        let (_, none) = get(&format!("{base}/pods?labelSelector=app%3Dother")).await;
        assert_eq!(none["items"], json!([]));
        let (code, pod) = get(&format!("{base}/namespaces/default/pods/web")).await;
        assert_eq!((code, &pod["kind"]), (StatusCode::OK, &json!("PodMetrics")));
        let (code, missing) = get(&format!("{base}/namespaces/other/pods/web")).await;
        assert_eq!(
            (code, &missing["reason"]),
            (StatusCode::NOT_FOUND, &json!("NotFound"))
        );
        assert_eq!(
            cache.source().samples.load(Ordering::Relaxed),
            2,
            "one pair of samples"
        );

        tokio::time::advance(std::time::Duration::from_secs(20)).await;
        get(&format!("{base}/nodes")).await;
        assert_eq!(cache.source().samples.load(Ordering::Relaxed), 3);
        tokio::time::advance(std::time::Duration::from_secs(3600)).await;
        get(&format!("{base}/nodes")).await;
        assert_eq!(
            cache.source().samples.load(Ordering::Relaxed),
            5,
            "a new pair of samples"
        );
    }
}
