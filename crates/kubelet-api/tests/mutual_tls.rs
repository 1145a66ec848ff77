//! TLS, access control and container logs, over real sockets with generated certificates.

// clippy.toml allows unwrap only inside of test functions, not in their helpers.
#![allow(clippy::unwrap_used)]

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kubelet_api::{
    AccessPolicy, AttachOptions, ContainerLogStream, ContainerSession, ExecOptions, LogError,
    LogOptions, PodSource, PortConnection, STREAM_IDLE_TIMEOUT, ServerIdentity, SessionError,
    serve,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

mod common;

use common::{API_SERVER_CLIENT, Ca, Server};

struct OnePod;

impl PodSource for OnePod {
    fn pods(&self) -> Vec<Arc<Pod>> {
        let pod = json!({
            "metadata": { "name": "hello", "namespace": "default", "uid": "1234" },
            "spec": { "containers": [{ "name": "main" }, { "name": "late" }],
                "initContainers": [{ "name": "first" }], "ephemeralContainers": [{ "name": "silent" }] },
            "status": { "containerStatuses": [
                { "name": "main", "ready": true, "restartCount": 0, "image": "i", "imageID": "", "state": { "running": {} } },
                { "name": "late", "ready": false, "restartCount": 0, "image": "i", "imageID": "",
                  "state": { "waiting": { "reason": "ContainerCreating" } } }
            ], "initContainerStatuses": [
                { "name": "first", "ready": true, "restartCount": 0, "image": "i", "imageID": "",
                  "state": { "terminated": { "exitCode": 0, "containerID": "coracle://1" } } }
            ], "ephemeralContainerStatuses": [
                { "name": "silent", "ready": false, "restartCount": 0, "image": "i", "imageID": "", "state": { "running": {} } }
            ] }
        });
        vec![Arc::new(serde_json::from_value(pod).unwrap())]
    }

    fn logs(
        &self,
        uid: &str,
        options: LogOptions,
    ) -> BoxFuture<'static, Result<ContainerLogStream, LogError>> {
        let uid = uid.to_owned();
        async move {
            if options.previous {
                return Err("no such run".into());
            }
            if options.container == "silent" {
                let silence = stream::pending::<io::Result<Bytes>>();
                return Ok(Counted::new(silence.boxed()).boxed());
            }
            if options.timestamps {
                return Err("the sandbox of pod hello has exited".into());
            }
            let lines = [
                format!("{uid} {}\n", options.container),
                "a second line\n".to_owned(),
            ];
            Ok(stream::iter(lines.map(|line| Ok(Bytes::from(line)))).boxed())
        }
        .boxed()
    }

    fn exec(
        &self,
        _: &str,
        _: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        no_streams()
    }

    fn attach(
        &self,
        _: &str,
        _: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        no_streams()
    }

    fn port_forward(
        &self,
        _: &str,
        _: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>> {
        no_streams()
    }
}

fn no_streams<T: Send + 'static>() -> BoxFuture<'static, Result<T, SessionError>> {
    async { Err(SessionError::internal("not supported by this pod")) }.boxed()
}

/// The number of open logs of the container `silent`.
static FOLLOWED: AtomicUsize = AtomicUsize::new(0);

/// A log that increments [`FOLLOWED`] while it exists.
struct Counted(ContainerLogStream);

impl Counted {
    fn new(log: ContainerLogStream) -> Self {
        FOLLOWED.fetch_add(1, Ordering::SeqCst);
        Self(log)
    }
}

impl Stream for Counted {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_next_unpin(context)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        FOLLOWED.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A server with that pod. Only the API server's certificate is allowed.
struct Kubelet(Server);

impl Kubelet {
    async fn start() -> Self {
        let access = AccessPolicy::for_common_names([API_SERVER_CLIENT.to_owned()]);
        Self(Server::start(OnePod, access).await)
    }

    /// One GET over one connection. Returns the whole response, or the error of TLS.
    async fn get(&self, path: &str, client: Option<(String, String)>) -> io::Result<String> {
        let mut stream = self.send_get(path, client).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        Ok(response)
    }

    /// Sends one GET over one connection, without reading the response.
    async fn send_get(
        &self,
        path: &str,
        client: Option<(String, String)>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut stream = self.0.connect(client).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: kubelet\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        Ok(stream)
    }

    async fn get_as_api_server(&self, path: &str) -> String {
        self.get(path, Some(self.0.ca.client(API_SERVER_CLIENT)))
            .await
            .unwrap()
    }
}

#[tokio::test]
async fn log_is_streamed() {
    let server = Kubelet::start().await;
    let response = server
        .get_as_api_server("/containerLogs/default/hello/main?follow=true")
        .await;
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    assert!(response.contains("content-type: text/plain"), "{response}");
    assert!(response.contains("1234 main\n"), "{response}");
    assert!(response.contains("a second line\n"), "{response}");
}

#[tokio::test]
async fn disconnect_ends_following_an_idle_log() {
    let server = Kubelet::start().await;
    let client = server.0.ca.client(API_SERVER_CLIENT);
    let path = "/containerLogs/default/hello/silent?follow=true";
    let mut stream = server.send_get(path, Some(client)).await.unwrap();
    // The response starts before the log has any data.
    let mut status_line = vec![0; 15];
    stream.read_exact(&mut status_line).await.unwrap();
    assert_eq!(status_line, b"HTTP/1.1 200 OK");
    assert_eq!(FOLLOWED.load(Ordering::SeqCst), 1);
    drop(stream);
    let closed = async {
        while FOLLOWED.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), closed)
        .await
        .unwrap();
}

#[tokio::test]
async fn init_container_has_a_log() {
    let server = Kubelet::start().await;
    let response = server
        .get_as_api_server("/containerLogs/default/hello/first")
        .await;
    assert!(response.contains("1234 first\n"), "{response}");
}

#[tokio::test]
async fn unavailable_logs_have_upstreams_errors() {
    let server = Kubelet::start().await;
    for (path, status, message) in [
        ("default/bye/main", 404, r#"pod "bye" does not exist"#),
        ("other/hello/main", 404, r#"pod "hello" does not exist"#),
        (
            "default/hello/side",
            404,
            r#"container "side" not found in pod "hello""#,
        ),
        (
            "default/hello/late",
            400,
            r#"container "late" in pod "hello" is waiting to start: ContainerCreating"#,
        ),
        (
            "default/hello/main?previous=true",
            400,
            r#"previous terminated container "main" in pod "hello" not found"#,
        ),
        (
            "default/hello/main?timestamps=true",
            400,
            "the sandbox of pod hello has exited",
        ),
        (
            "default/hello/main?tailLines=x",
            400,
            r#"{"message": "Unable to decode query."}"#,
        ),
        (
            "default/hello/main?tailLines=-2",
            422,
            r#"{"message": "Invalid request."}"#,
        ),
    ] {
        let response = server
            .get_as_api_server(&format!("/containerLogs/{path}"))
            .await;
        assert!(
            response.starts_with(&format!("HTTP/1.1 {status}")),
            "{path}: {response}"
        );
        assert!(response.ends_with(message), "{path}: {response}");
    }
}

#[tokio::test]
async fn runningpods_lists_only_running_containers() {
    let kubelet = Kubelet::start().await;
    for path in ["/runningpods/", "/runningpods"] {
        let response = kubelet.get_as_api_server(path).await;
        assert!(response.contains(r#""uid":"1234""#), "{path}: {response}");
        assert!(response.contains(r#""name":"main""#), "{path}: {response}");
        assert!(!response.contains(r#""name":"late""#), "{path}: {response}");
    }
}

#[tokio::test]
async fn api_server_is_served() {
    let server = Kubelet::start().await;
    let health = server.get_as_api_server("/healthz").await;
    assert!(health.starts_with("HTTP/1.1 200 OK\r\n"), "{health}");
    assert!(health.ends_with("\r\n\r\nok"), "{health}");

    let pods = server.get_as_api_server("/pods").await;
    let (_, body) = pods.split_once("\r\n\r\n").unwrap();
    let list: Value = serde_json::from_str(body).unwrap();
    assert_eq!(list["kind"], "PodList");
    assert_eq!(list["items"][0]["metadata"]["name"], "hello");

    let nothing = server.get_as_api_server("/there/is/no/such/path").await;
    assert!(nothing.starts_with("HTTP/1.1 404"), "{nothing}");
    assert!(nothing.ends_with("404 page not found\n"), "{nothing}");
}

#[tokio::test]
async fn certificate_with_another_name_is_rejected() {
    let server = Kubelet::start().await;
    for path in ["/healthz", "/pods", "/nowhere"] {
        let response = server
            .get(path, Some(server.0.ca.client("system:node:node2")))
            .await
            .unwrap();
        assert!(response.starts_with("HTTP/1.1 401"), "{response}");
    }
}

#[tokio::test]
async fn tls_rejects_clients_without_certificate_of_the_ca() {
    let server = Kubelet::start().await;
    assert!(server.get("/healthz", None).await.is_err());
    // The right name, signed by another CA.
    let other_client = Ca::new("another CA").client(API_SERVER_CLIENT);
    assert!(server.get("/healthz", Some(other_client)).await.is_err());
}

#[tokio::test]
async fn garbage_and_idle_connections_do_not_block_others() {
    let server = Kubelet::start().await;
    let mut garbage = TcpStream::connect(server.0.address).await.unwrap();
    garbage
        .write_all(b"GET / HTTP/1.0\r\n\r\n\0\xff\xfe")
        .await
        .unwrap();
    let _silent = TcpStream::connect(server.0.address).await.unwrap();

    let health = server.get_as_api_server("/healthz").await;
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");

    // The connection with garbage is closed.
    let mut response = Vec::new();
    let ended =
        tokio::time::timeout(Duration::from_secs(5), garbage.read_to_end(&mut response)).await;
    assert!(ended.is_ok());
}

#[tokio::test]
async fn shutdown_does_not_wait_for_idle_connections() {
    let server = Kubelet::start().await;
    let _silent = TcpStream::connect(server.0.address).await.unwrap();
    server.get_as_api_server("/healthz").await;
    server.0.shutdown.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(5), server.0.task)
        .await
        .unwrap();
    assert!(ended.unwrap().is_ok());
}

#[tokio::test]
async fn invalid_identity_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let identity = ServerIdentity {
        cert_chain_pem: String::new(),
        key_pem: String::new(),
        client_ca_pem: "not PEM".to_owned(),
    };
    let error = serve(
        listener,
        identity,
        AccessPolicy::for_common_names([]),
        Arc::new(OnePod),
        STREAM_IDLE_TIMEOUT,
        CancellationToken::new(),
    )
    .await
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "no certificate in the client CA of the kubelet API"
    );
}
