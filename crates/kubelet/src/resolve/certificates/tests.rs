//! Tests of certificate renewal, with a fake API server and signer, in simulated time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use k8s_openapi::jiff::Timestamp;
use kube::client::Body;
use serde_json::{Value, json};
use tower::service_fn;
use volumes::content::pem;

use super::*;

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/podcertificaterequests";
const OF_NAMESPACE: &str = "/apis/certificates.k8s.io/v1/namespaces/n/podcertificaterequests";

/// The state of the fake API server.
#[derive(Clone, Default)]
struct ServerState {
    requests: Vec<Value>,
    watch_events: Vec<Value>,
    /// Whether the service account exists.
    has_account: bool,
}

struct FakeServer(Arc<watch::Sender<ServerState>>);

impl FakeServer {
    fn new() -> Self {
        let state = ServerState {
            has_account: true,
            ..Default::default()
        };
        Self(Arc::new(watch::channel(state).0))
    }

    fn client(&self) -> Client {
        let state = Arc::clone(&self.0);
        let service = service_fn(move |request: Request<Body>| {
            let state = Arc::clone(&state);
            async move {
                let (parts, body) = request.into_parts();
                let query = parts.uri.query().unwrap_or_default();
                if parts.uri.path() == REQUESTS && query.contains("watch=true") {
                    assert!(
                        query.contains("fieldSelector=spec.nodeName%3Dnode1"),
                        "{query}"
                    );
                    let body = StreamBody::new(watch_lines(&state, query)).boxed_unsync();
                    return Ok(Response::new(body));
                }
                let body = body.collect().await?.to_bytes();
                let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
                let (code, response) = handle(&state, &parts.method, parts.uri.path(), body);
                let response = Full::new(Bytes::from(response.to_string()))
                    .map_err(std::io::Error::other)
                    .boxed_unsync();
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(
                    Response::builder().status(code).body(response)?,
                )
            }
        });
        Client::new(service, "default")
    }

    /// Waits for the `number`th request.
    async fn request(&self, number: usize) -> Value {
        let mut state = self.0.subscribe();
        let state = state.wait_for(|state| state.requests.len() > number).await;
        state.unwrap().requests[number].clone()
    }

    fn count(&self) -> usize {
        self.0.borrow().requests.len()
    }

    /// Waits for the `number`th request and sets its status.
    async fn respond(&self, number: usize, status: Value) {
        let mut request = self.request(number).await;
        request["status"] = status;
        self.0.send_modify(|state| {
            let event = json!({ "type": "MODIFIED", "object": request });
            state.watch_events.push(event);
        });
    }

    async fn delete(&self, number: usize) {
        let request = self.request(number).await;
        self.0.send_modify(|state| {
            let event = json!({ "type": "DELETED", "object": request });
            state.watch_events.push(event);
        });
    }
}

fn handle(
    state: &watch::Sender<ServerState>,
    method: &Method,
    path: &str,
    mut body: Value,
) -> (StatusCode, Value) {
    let object = |name: &str, uid: &str| json!({ "metadata": { "name": name, "uid": uid } });
    match (method, path) {
        (&Method::GET, "/api/v1/namespaces/n/serviceaccounts/robot")
            if state.borrow().has_account =>
        {
            (StatusCode::OK, object("robot", "account-uid"))
        }
        (&Method::GET, "/api/v1/nodes/node1") => (StatusCode::OK, object("node1", "node-uid")),
        (&Method::GET, REQUESTS) => {
            let version = state.borrow().watch_events.len().to_string();
            let list = json!({ "metadata": { "resourceVersion": version }, "items": [] });
            (StatusCode::OK, list)
        }
        (&Method::POST, OF_NAMESPACE) => {
            state.send_modify(|state| {
                let name = format!("req-{}", state.requests.len());
                body["metadata"]["name"] = json!(name);
                body["apiVersion"] = json!("certificates.k8s.io/v1");
                body["kind"] = json!("PodCertificateRequest");
                state.requests.push(body.clone());
                let event = json!({ "type": "ADDED", "object": body });
                state.watch_events.push(event);
            });
            (StatusCode::CREATED, body)
        }
        _ => {
            let status = json!({ "kind": "Status", "status": "Failure", "code": 404, "message": format!("{path} not found"), "reason": "NotFound" });
            (StatusCode::NOT_FOUND, status)
        }
    }
}

/// The watch events after a resourceVersion, one per line.
fn watch_lines(
    state: &watch::Sender<ServerState>,
    query: &str,
) -> impl futures::Stream<Item = Result<Frame<Bytes>, std::io::Error>> + use<> {
    let version = query
        .split('&')
        .find_map(|part| part.strip_prefix("resourceVersion="));
    let from: usize = version.unwrap().parse().unwrap();
    let receiver = state.subscribe();
    futures::stream::unfold((receiver, from), |(mut receiver, from)| async move {
        let mut event = {
            let state = receiver
                .wait_for(|state| state.watch_events.len() > from)
                .await;
            state.ok()?.watch_events[from].clone()
        };
        event["object"]["metadata"]["resourceVersion"] = json!((from + 1).to_string());
        let line = Bytes::from(format!("{event}\n"));
        Some((Ok(Frame::data(line)), (receiver, from + 1)))
    })
    .boxed()
}

fn pod() -> Pod {
    let certificate = json!({
        "signerName": "example.com/signer", "keyType": "ED25519", "credentialBundlePath": "all.pem",
        "maxExpirationSeconds": 7200, "userAnnotations": { "example.com/path": "/x" },
    });
    let pod = json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "pod-uid" },
        "spec": {
            "serviceAccountName": "robot",
            "containers": [{ "name": "c", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
            "volumes": [
                { "name": "v", "projected": { "sources": [{ "configMap": { "name": "c" } }, { "podCertificate": certificate }] } },
                { "name": "unused", "projected": { "sources": [{ "podCertificate": certificate }] } },
            ],
        },
    });
    serde_json::from_value(pod).unwrap()
}

/// The status of an issued certificate of one byte, with refresh and expiry times in seconds from now.
fn issued(certificate: u8, renew: i64, end: i64) -> Value {
    let now = Timestamp::now().as_second();
    let time = |after: i64| Timestamp::from_second(now + after).unwrap().to_string();
    let block = pem::encode(pem::CERTIFICATE, &[certificate]);
    json!({
        "certificateChain": format!("text\n{block}more text\n"),
        "notBefore": time(0), "beginRefreshAt": time(renew), "notAfter": time(end),
        "conditions": [condition("Issued", "", "")],
    })
}

fn refused(kind: &str) -> Value {
    json!({ "conditions": [condition(kind, "UnsupportedKeyType", "try RSA3072")] })
}

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    json!({ "type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" })
}

/// The result for the only used source of [`pod`].
fn credentials_of(found: &PodCertificates) -> Result<CredentialBundle, String> {
    assert_eq!(found.certificates.len(), 1);
    found.certificates[&("v".to_owned(), 1)].clone()
}

fn reasons(found: &PodCertificates) -> Vec<&'static str> {
    found.warnings.iter().map(|(reason, _)| *reason).collect()
}

async fn within<T>(seconds: u64, future: impl Future<Output = T>) -> Option<T> {
    let seconds = Duration::from_secs(seconds);
    tokio::time::timeout(seconds, future).await.ok()
}

#[tokio::test(start_paused = true)]
async fn certificate_is_renewed_at_begin_refresh_time() {
    let server = FakeServer::new();
    let certificates = CertificateManager::new(server.client(), "node1");
    let pod = pod();
    let (mut first, ()) = tokio::join!(
        certificates.get(&pod),
        server.respond(0, issued(1, 1800, 3600))
    );
    let issued_first = credentials_of(&first).unwrap();
    assert_eq!(issued_first.chain, pem::encode(pem::CERTIFICATE, &[1]));
    assert!(
        issued_first
            .key
            .starts_with("-----BEGIN PRIVATE KEY-----\n")
    );
    assert_eq!(reasons(&first), Vec::<&str>::new());
    // A second call returns the same certificate.
    assert_eq!(
        credentials_of(&certificates.get(&pod).await).unwrap(),
        issued_first
    );

    let mut request = server.request(0).await;
    let proof = request["spec"]["stubPKCS10Request"].take();
    assert!(proof.as_str().unwrap().len() > 100);
    insta::assert_json_snapshot!(request);

    // Not before the refresh time, and within five minutes after it.
    assert!(within(1790, server.request(1)).await.is_none());
    assert!(within(320, server.request(1)).await.is_some());
    // Until the signer responds, the state does not change.
    assert!(within(60, first.states[0].changed()).await.is_none());
    server.respond(1, issued(2, 1800, 3600)).await;
    assert!(within(60, first.states[0].changed()).await.is_some());
    let next = credentials_of(&certificates.get(&pod).await).unwrap();
    assert_eq!(next.chain, pem::encode(pem::CERTIFICATE, &[2]));
    assert_ne!(next.key, issued_first.key);

    // No requests are created for a forgotten pod.
    certificates.forget("pod-uid");
    assert!(within(100_000, server.request(2)).await.is_none());
    assert!(certificates.certificates.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn refused_request_is_not_repeated() {
    for kind in ["Denied", "Failed"] {
        let server = FakeServer::new();
        let certificates = CertificateManager::new(server.client(), "node1");
        let pod = pod();
        let (found, ()) = tokio::join!(certificates.get(&pod), server.respond(0, refused(kind)));
        let why = credentials_of(&found).unwrap_err();
        assert!(why.contains("reason=\"UnsupportedKeyType\""), "{why}");
        assert_eq!(reasons(&found), [kind]);
        assert!(within(100_000, server.request(1)).await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn missing_renewal_causes_warnings() {
    let server = FakeServer::new();
    let certificates = CertificateManager::new(server.client(), "node1");
    let pod = pod();
    let (first, ()) = tokio::join!(
        certificates.get(&pod),
        server.respond(0, issued(1, 1800, 3600))
    );
    let issued_first = credentials_of(&first).unwrap();
    // The renewal is requested, and the signer does not respond.
    tokio::time::sleep_until(first.refresh_at.unwrap()).await;
    assert_eq!(server.count(), 2);
    let overdue = certificates.get(&pod).await;
    assert_eq!(reasons(&overdue), ["CertificateOverdueForRefresh"]);
    tokio::time::sleep_until(overdue.refresh_at.unwrap()).await;
    server.respond(1, refused("Denied")).await;
    let mut state = overdue.states[0].clone();
    assert!(within(60, state.changed()).await.is_some());
    let expired = certificates.get(&pod).await;
    assert_eq!(
        reasons(&expired),
        [
            "Denied",
            "CertificateOverdueForRefresh",
            "CertificateExpired"
        ]
    );
    assert_eq!(expired.refresh_at, None);
    assert_eq!(credentials_of(&expired).unwrap(), issued_first);
}

#[tokio::test(start_paused = true)]
async fn failed_requests_are_reported_and_retried() {
    let server = FakeServer::new();
    server.0.send_modify(|state| state.has_account = false);
    let certificates = CertificateManager::new(server.client(), "node1");
    let pod = pod();
    let why = credentials_of(&certificates.get(&pod).await).unwrap_err();
    assert!(
        why.contains("while fetching service account \"n/robot\""),
        "{why}"
    );
    server.0.send_modify(|state| state.has_account = true);
    assert!(within(120, server.request(0)).await.is_some());
    // After the request is deleted, a new one is created with a new key.
    server.delete(0).await;
    let second = within(120, server.request(1)).await.unwrap();
    let proof = |request: &Value| request["spec"]["stubPKCS10Request"].clone();
    assert_ne!(proof(&second), proof(&server.request(0).await));
    let why = credentials_of(&certificates.get(&pod).await).unwrap_err();
    insta::assert_snapshot!(why);
    let mut state = certificates.get(&pod).await.states[0].clone();
    server.respond(1, issued(3, 1800, 3600)).await;
    assert!(within(60, state.changed()).await.is_some());
    assert!(credentials_of(&certificates.get(&pod).await).is_ok());
}
