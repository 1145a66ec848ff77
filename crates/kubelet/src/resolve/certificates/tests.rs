//! Certificates by the clock: an API server and a signer that do as the test says, and hours that pass at once.

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

/// What the API server holds, and all that has happened to it.
#[derive(Clone, Default)]
struct World {
    requests: Vec<Value>,
    /// As a watch shows it.
    happened: Vec<Value>,
    /// There is a service account.
    has_account: bool,
}

struct Server(Arc<watch::Sender<World>>);

impl Server {
    fn new() -> Self {
        let world = World {
            has_account: true,
            ..Default::default()
        };
        Self(Arc::new(watch::channel(world).0))
    }

    fn client(&self) -> Client {
        let world = Arc::clone(&self.0);
        let service = service_fn(move |request: Request<Body>| {
            let world = Arc::clone(&world);
            async move {
                let (parts, body) = request.into_parts();
                let query = parts.uri.query().unwrap_or_default();
                if parts.uri.path() == REQUESTS && query.contains("watch=true") {
                    assert!(
                        query.contains("fieldSelector=spec.nodeName%3Dnode1"),
                        "{query}"
                    );
                    let body = StreamBody::new(watched(&world, query)).boxed_unsync();
                    return Ok(Response::new(body));
                }
                let body = body.collect().await?.to_bytes();
                let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
                let (code, answer) = answer(&world, &parts.method, parts.uri.path(), body);
                let answer = Full::new(Bytes::from(answer.to_string()))
                    .map_err(std::io::Error::other)
                    .boxed_unsync();
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(
                    Response::builder().status(code).body(answer)?,
                )
            }
        });
        Client::new(service, "default")
    }

    /// Waits for the `number`th request.
    async fn request(&self, number: usize) -> Value {
        let mut world = self.0.subscribe();
        let world = world.wait_for(|world| world.requests.len() > number).await;
        world.unwrap().requests[number].clone()
    }

    fn count(&self) -> usize {
        self.0.borrow().requests.len()
    }

    /// Answers the `number`th request, once it is there.
    async fn sign(&self, number: usize, status: Value) {
        let mut request = self.request(number).await;
        request["status"] = status;
        self.0.send_modify(|world| {
            let event = json!({ "type": "MODIFIED", "object": request });
            world.happened.push(event);
        });
    }

    /// Deletes it.
    async fn delete(&self, number: usize) {
        let request = self.request(number).await;
        self.0.send_modify(|world| {
            let event = json!({ "type": "DELETED", "object": request });
            world.happened.push(event);
        });
    }
}

fn answer(
    world: &watch::Sender<World>,
    method: &Method,
    path: &str,
    mut body: Value,
) -> (StatusCode, Value) {
    let object = |name: &str, uid: &str| json!({ "metadata": { "name": name, "uid": uid } });
    match (method, path) {
        (&Method::GET, "/api/v1/namespaces/n/serviceaccounts/robot")
            if world.borrow().has_account =>
        {
            (StatusCode::OK, object("robot", "account-uid"))
        }
        (&Method::GET, "/api/v1/nodes/node1") => (StatusCode::OK, object("node1", "node-uid")),
        (&Method::GET, REQUESTS) => {
            let version = world.borrow().happened.len().to_string();
            let list = json!({ "metadata": { "resourceVersion": version }, "items": [] });
            (StatusCode::OK, list)
        }
        (&Method::POST, OF_NAMESPACE) => {
            world.send_modify(|world| {
                let name = format!("req-{}", world.requests.len());
                body["metadata"]["name"] = json!(name);
                body["apiVersion"] = json!("certificates.k8s.io/v1");
                body["kind"] = json!("PodCertificateRequest");
                world.requests.push(body.clone());
                let event = json!({ "type": "ADDED", "object": body });
                world.happened.push(event);
            });
            (StatusCode::CREATED, body)
        }
        _ => {
            let status = json!({ "kind": "Status", "status": "Failure", "code": 404, "message": format!("{path} not found"), "reason": "NotFound" });
            (StatusCode::NOT_FOUND, status)
        }
    }
}

/// What happens from a version on, a line each.
fn watched(
    world: &watch::Sender<World>,
    query: &str,
) -> impl futures::Stream<Item = Result<Frame<Bytes>, std::io::Error>> + use<> {
    let version = query
        .split('&')
        .find_map(|part| part.strip_prefix("resourceVersion="));
    let from: usize = version.unwrap().parse().unwrap();
    let receiver = world.subscribe();
    futures::stream::unfold((receiver, from), |(mut receiver, from)| async move {
        let mut event = {
            let world = receiver.wait_for(|world| world.happened.len() > from).await;
            world.ok()?.happened[from].clone()
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

/// A signer's yes: a certificate of one byte, to be renewed and to end after so many seconds.
fn issued(certificate: u8, renew: i64, end: i64) -> Value {
    let now = Timestamp::now().as_second();
    let time = |after: i64| Timestamp::from_second(now + after).unwrap().to_string();
    let block = pem::encode(pem::CERTIFICATE, &[certificate]);
    json!({
        "certificateChain": format!("words\n{block}more words\n"),
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

/// The one source of [`pod`].
fn of(answer: &Answer) -> Result<Credentials, String> {
    assert_eq!(answer.certificates.len(), 1);
    answer.certificates[&("v".to_owned(), 1)].clone()
}

fn reasons(answer: &Answer) -> Vec<&'static str> {
    answer.warnings.iter().map(|(reason, _)| *reason).collect()
}

async fn within<T>(seconds: u64, future: impl Future<Output = T>) -> Option<T> {
    let seconds = Duration::from_secs(seconds);
    tokio::time::timeout(seconds, future).await.ok()
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_renewed_when_its_signer_says_so() {
    let server = Server::new();
    let certificates = Certificates::new(server.client(), "node1");
    let pod = pod();
    let (mut first, ()) = tokio::join!(
        certificates.get(&pod),
        server.sign(0, issued(1, 1800, 3600))
    );
    let had = of(&first).unwrap();
    assert_eq!(had.chain, pem::encode(pem::CERTIFICATE, &[1]));
    assert!(had.key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!(reasons(&first), Vec::<&str>::new());
    // Who asks again is given the same.
    assert_eq!(of(&certificates.get(&pod).await).unwrap(), had);

    let mut request = server.request(0).await;
    let proof = request["spec"]["stubPKCS10Request"].take();
    assert!(proof.as_str().unwrap().len() > 100);
    insta::assert_json_snapshot!(request);

    // Not before it is due, and then within five minutes.
    assert!(within(1790, server.request(1)).await.is_none());
    assert!(within(320, server.request(1)).await.is_some());
    // Until the signer answers the pod keeps what it has, and hears nothing.
    assert!(within(60, first.signals[0].changed()).await.is_none());
    server.sign(1, issued(2, 1800, 3600)).await;
    assert!(within(60, first.signals[0].changed()).await.is_some());
    let next = of(&certificates.get(&pod).await).unwrap();
    assert_eq!(next.chain, pem::encode(pem::CERTIFICATE, &[2]));
    assert_ne!(next.key, had.key);

    // Nothing is asked for a pod that is gone.
    certificates.forget("pod-uid");
    assert!(within(100_000, server.request(2)).await.is_none());
    assert!(certificates.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_signer_that_refuses_is_not_asked_again() {
    for kind in ["Denied", "Failed"] {
        let server = Server::new();
        let certificates = Certificates::new(server.client(), "node1");
        let pod = pod();
        let (answer, ()) = tokio::join!(certificates.get(&pod), server.sign(0, refused(kind)));
        let why = of(&answer).unwrap_err();
        assert!(why.contains("reason=\"UnsupportedKeyType\""), "{why}");
        assert_eq!(reasons(&answer), [kind]);
        assert!(within(100_000, server.request(1)).await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_is_not_renewed_ends_with_warnings() {
    let server = Server::new();
    let certificates = Certificates::new(server.client(), "node1");
    let pod = pod();
    let (first, ()) = tokio::join!(
        certificates.get(&pod),
        server.sign(0, issued(1, 1800, 3600))
    );
    let had = of(&first).unwrap();
    // The next one is asked for, and the signer says nothing.
    tokio::time::sleep_until(first.again_at.unwrap()).await;
    assert_eq!(server.count(), 2);
    let overdue = certificates.get(&pod).await;
    assert_eq!(reasons(&overdue), ["CertificateOverdueForRefresh"]);
    tokio::time::sleep_until(overdue.again_at.unwrap()).await;
    server.sign(1, refused("Denied")).await;
    let mut signal = overdue.signals[0].clone();
    assert!(within(60, signal.changed()).await.is_some());
    let expired = certificates.get(&pod).await;
    assert_eq!(
        reasons(&expired),
        [
            "Denied",
            "CertificateOverdueForRefresh",
            "CertificateExpired"
        ]
    );
    assert_eq!(expired.again_at, None);
    assert_eq!(of(&expired).unwrap(), had);
}

#[tokio::test(start_paused = true)]
async fn what_stands_in_the_way_is_told_and_tried_again() {
    let server = Server::new();
    server.0.send_modify(|world| world.has_account = false);
    let certificates = Certificates::new(server.client(), "node1");
    let pod = pod();
    let why = of(&certificates.get(&pod).await).unwrap_err();
    assert!(
        why.contains("while fetching service account \"n/robot\""),
        "{why}"
    );
    server.0.send_modify(|world| world.has_account = true);
    assert!(within(120, server.request(0)).await.is_some());
    // Somebody deletes the request: there is another one, with another key.
    server.delete(0).await;
    let second = within(120, server.request(1)).await.unwrap();
    let proof = |request: &Value| request["spec"]["stubPKCS10Request"].clone();
    assert_ne!(proof(&second), proof(&server.request(0).await));
    let why = of(&certificates.get(&pod).await).unwrap_err();
    insta::assert_snapshot!(why);
    let mut signal = certificates.get(&pod).await.signals[0].clone();
    server.sign(1, issued(3, 1800, 3600)).await;
    assert!(within(60, signal.changed()).await.is_some());
    assert!(of(&certificates.get(&pod).await).is_ok());
}
