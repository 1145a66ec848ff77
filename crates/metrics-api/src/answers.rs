//! The resources `nodes` and `pods`.

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

use crate::discovery;
use crate::kubelets::{Chosen, Source};
use crate::rates::{PodUsage, Usage};
use crate::usage::Usages;
use crate::{GROUP, VERSION};

/// Every endpoint.
pub(crate) fn router<S: Source>(usages: Arc<Usages<S>>) -> Router {
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
        .with_state(usages)
}

type Known<S> = State<Arc<Usages<S>>>;

async fn list_nodes<S: Source>(State(usages): Known<S>, RawQuery(query): RawQuery) -> Response {
    let found = usages.source().nodes(chosen(query)).await;
    match found {
        Ok(nodes) => {
            let now = usages.now().await;
            let items = nodes.iter().filter_map(|meta| {
                let usage = now.nodes.get(meta.name.as_deref()?)?;
                Some(node(meta, usage))
            });
            list("NodeMetricsList", items.collect())
        }
        Err(error) => refused(error),
    }
}

async fn get_node<S: Source>(State(usages): Known<S>, Path(name): Path<String>) -> Response {
    match usages.source().nodes(named(&name)).await {
        Ok(nodes) => {
            let now = usages.now().await;
            let usage = now.nodes.get(&name);
            match nodes.first().zip(usage) {
                Some((meta, usage)) => Json(node(meta, usage)).into_response(),
                None => missing("nodes", &name),
            }
        }
        Err(error) => refused(error),
    }
}

async fn list_pods<S: Source>(State(usages): Known<S>, RawQuery(query): RawQuery) -> Response {
    pods(&usages, None, chosen(query)).await
}

async fn list_namespace<S: Source>(
    State(usages): Known<S>,
    Path(namespace): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    pods(&usages, Some(namespace), chosen(query)).await
}

async fn get_pod<S: Source>(
    State(usages): Known<S>,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    match find_pods(&usages, Some(namespace), named(&name)).await {
        Ok(found) => match found.into_iter().next() {
            Some(found) => Json(found).into_response(),
            None => missing("pods", &name),
        },
        Err(error) => refused(error),
    }
}

async fn pods<S: Source>(
    usages: &Usages<S>,
    namespace: Option<String>,
    chosen: Chosen,
) -> Response {
    match find_pods(usages, namespace, chosen).await {
        Ok(items) => list("PodMetricsList", items),
        Err(error) => refused(error),
    }
}

async fn find_pods<S: Source>(
    usages: &Usages<S>,
    namespace: Option<String>,
    chosen: Chosen,
) -> kube::Result<Vec<Value>> {
    let found = usages.source().pods(namespace, chosen).await?;
    if found.is_empty() {
        // Nobody needs to be asked.
        return Ok(Vec::new());
    }
    let now = usages.now().await;
    let by_uid: HashMap<&str, &PodUsage> =
        now.pods.iter().map(|pod| (pod.uid.as_str(), pod)).collect();
    let items = found.iter().filter_map(|meta| {
        let usage = by_uid.get(meta.uid.as_deref()?)?;
        Some(pod(meta, usage))
    });
    Ok(items.collect())
}

fn node(meta: &ObjectMeta, usage: &Usage) -> Value {
    json!({
        "kind": "NodeMetrics",
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "metadata": metadata(meta, usage),
        "timestamp": Time(usage.at),
        "window": window(usage),
        "usage": amounts(usage),
    })
}

fn pod(meta: &ObjectMeta, pod: &PodUsage) -> Value {
    // Containers are measured at one time, but the shortest window is the one that holds for all.
    let of_pod = pod
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
        "metadata": of_pod.map(|usage| metadata(meta, usage)),
        "timestamp": of_pod.map(|usage| Time(usage.at)),
        "window": of_pod.map(window),
        "containers": containers,
    })
}

fn metadata(meta: &ObjectMeta, usage: &Usage) -> ObjectMeta {
    ObjectMeta {
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        labels: meta.labels.clone(),
        creation_timestamp: Some(Time(usage.at)),
        ..ObjectMeta::default()
    }
}

fn amounts(usage: &Usage) -> Value {
    json!({
        "cpu": format!("{}n", usage.nano_cores),
        "memory": format!("{}Ki", usage.memory / 1024),
    })
}

/// As Go writes durations.
fn window(usage: &Usage) -> String {
    format!("{:.3}s", usage.window)
}

fn list(kind: &str, items: Vec<Value>) -> Response {
    let api_version = format!("{GROUP}/{VERSION}");
    Json(json!({"kind": kind, "apiVersion": api_version, "metadata": {}, "items": items}))
        .into_response()
}

/// The objects that a request chooses.
fn chosen(query: Option<String>) -> Chosen {
    let mut chosen = Chosen::default();
    let query = query.unwrap_or_default();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let value = (!value.is_empty()).then(|| value.into_owned());
        match &*name {
            "labelSelector" => chosen.labels = value,
            "fieldSelector" => chosen.fields = value,
            _ => {}
        }
    }
    chosen
}

fn named(name: &str) -> Chosen {
    Chosen {
        labels: None,
        fields: Some(format!("metadata.name={name}")),
    }
}

/// What the API server said, such as that a selector makes no sense.
fn refused(error: kube::Error) -> Response {
    match error {
        kube::Error::Api(said) => {
            let code = StatusCode::from_u16(said.code).unwrap_or(StatusCode::BAD_GATEWAY);
            status(code, &said.message)
        }
        other => status(StatusCode::SERVICE_UNAVAILABLE, &other.to_string()),
    }
}

fn missing(resource: &str, name: &str) -> Response {
    let words = format!("{resource}.{GROUP} {name:?} not found");
    status(StatusCode::NOT_FOUND, &words)
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

    /// One node with one pod that uses half a processor; each look is ten seconds after the one before.
    #[derive(Default)]
    struct Cluster {
        looks: AtomicI64,
    }

    impl Source for Cluster {
        fn summaries(&self) -> BoxFuture<'_, Vec<StatsSummary>> {
            let look = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
            let (time, used) = (at(10 * look), look * 5_000_000_000);
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

        fn nodes(&self, _: Chosen) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
            let meta = json!({"name": "node1", "labels": {"a": "b"}});
            async move { Ok(vec![serde_json::from_value(meta).unwrap()]) }.boxed()
        }

        fn pods(
            &self,
            namespace: Option<String>,
            chosen: Chosen,
        ) -> BoxFuture<'_, kube::Result<Vec<ObjectMeta>>> {
            let fits = namespace.is_none_or(|namespace| namespace == "default")
                && chosen.labels.is_none_or(|labels| labels == "app=web");
            let meta = json!({"name": "web", "namespace": "default", "uid": "u1", "labels": {"app": "web"}});
            let found = fits.then(|| serde_json::from_value(meta).unwrap());
            async move { Ok(found.into_iter().collect()) }.boxed()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lists_and_single_objects_are_told() {
        let usages = Arc::new(Usages::new(Cluster::default()));
        let router = router(usages.clone());
        let ask = async |path: &str| {
            let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
            let answer = router.clone().oneshot(request).await.unwrap();
            let code = answer.status();
            let text = answer.into_body().collect().await.unwrap().to_bytes();
            (code, serde_json::from_slice::<Value>(&text).unwrap())
        };
        let base = "/apis/metrics.k8s.io/v1beta1";
        let (_, resources) = ask(base).await;
        assert_eq!(resources["resources"][1]["kind"], "PodMetrics");
        let (_, nodes) = ask(&format!("{base}/nodes")).await;
        insta::assert_json_snapshot!(nodes["items"][0]);
        let (_, pods) = ask(&format!(
            "{base}/namespaces/default/pods?labelSelector=app%3Dweb"
        ))
        .await;
        insta::assert_json_snapshot!(pods["items"][0]);
        let (_, none) = ask(&format!("{base}/pods?labelSelector=app%3Dother")).await;
        assert_eq!(none["items"], json!([]));
        let (code, pod) = ask(&format!("{base}/namespaces/default/pods/web")).await;
        assert_eq!((code, &pod["kind"]), (StatusCode::OK, &json!("PodMetrics")));
        let (code, missing) = ask(&format!("{base}/namespaces/other/pods/web")).await;
        assert_eq!(
            (code, &missing["reason"]),
            (StatusCode::NOT_FOUND, &json!("NotFound"))
        );
        assert_eq!(
            usages.source().looks.load(Ordering::Relaxed),
            2,
            "asked once"
        );

        tokio::time::advance(std::time::Duration::from_secs(20)).await;
        ask(&format!("{base}/nodes")).await;
        assert_eq!(usages.source().looks.load(Ordering::Relaxed), 3);
        tokio::time::advance(std::time::Duration::from_secs(3600)).await;
        ask(&format!("{base}/nodes")).await;
        assert_eq!(
            usages.source().looks.load(Ordering::Relaxed),
            5,
            "two fresh looks"
        );
    }
}
