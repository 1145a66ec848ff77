//! Exec, attach and port-forward over real sockets: TLS, HTTP, the upgrade, and access control.

// clippy.toml allows unwrap only inside of test functions, not in their helpers.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kubelet_api::{
    AccessPolicy, AccessRequest, AttachOptions, AuthenticatedUser, ContainerLogStream,
    ContainerSession, DelegatedAuth, DelegatedAuthError, ExecOptions, LogError, LogOptions,
    PodSource, PortConnection, SessionError, SessionExit, SessionOutput,
};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use common::{API_SERVER_CLIENT, Ca, Server};

/// A pod in which every command echoes its input.
struct Echo;

impl PodSource for Echo {
    fn pods(&self) -> Vec<Arc<Pod>> {
        let status = |name, state| json!({ "name": name, "ready": true, "restartCount": 0, "image": "i", "imageID": "", "state": state });
        let pod = json!({
            "metadata": { "name": "hello", "namespace": "default", "uid": "1234" },
            "spec": { "containers": [{ "name": "main" }, { "name": "late" }, { "name": "terminal", "tty": true }] },
            "status": { "phase": "Running", "containerStatuses": [
                status("main", json!({ "running": {} })),
                status("terminal", json!({ "running": {} })),
                status("late", json!({ "waiting": {} })),
            ] }
        });
        vec![Arc::new(serde_json::from_value(pod).unwrap())]
    }

    fn logs(
        &self,
        _: &str,
        _: LogOptions,
    ) -> BoxFuture<'static, Result<ContainerLogStream, LogError>> {
        async { Err("no logs here".into()) }.boxed()
    }

    fn exec(
        &self,
        _: &str,
        _: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        async {
            let (stdin, input) = mpsc::channel(1);
            let output = stream::unfold(Some(input), |input| async {
                let mut input = input?;
                Some(match input.recv().await {
                    Some(bytes) => (SessionOutput::Stdout(bytes), Some(input)),
                    None => (SessionOutput::Exit(SessionExit::Code(0)), None),
                })
            });
            Ok(ContainerSession {
                stdin: Some(stdin),
                resize: None,
                output: output.boxed(),
            })
        }
        .boxed()
    }

    fn attach(
        &self,
        _: &str,
        _: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        async { Err(SessionError::internal("nothing to attach to")) }.boxed()
    }

    fn port_forward(
        &self,
        _: &str,
        _: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>> {
        async { Err(SessionError::internal("connection refused")) }.boxed()
    }
}

/// Authenticates the token `reader`, which may only read the node's health, and `admin`, which may do anything.
struct Rbac;

impl DelegatedAuth for Rbac {
    fn authenticate(
        &self,
        token: &str,
    ) -> BoxFuture<'static, Result<Option<AuthenticatedUser>, DelegatedAuthError>> {
        let name = match token {
            "reader" => Some("system:serviceaccount:monitoring:reader"),
            "admin" => Some("system:admin"),
            _ => None,
        };
        let user = name.map(|name| AuthenticatedUser {
            name: name.to_owned(),
            ..AuthenticatedUser::default()
        });
        async { Ok(user) }.boxed()
    }

    fn authorize(
        &self,
        request: &AccessRequest,
    ) -> BoxFuture<'static, Result<bool, DelegatedAuthError>> {
        let allowed = request.verb == "get" && request.subresource == "healthz"
            || request.user.name == "system:admin";
        async move { Ok(allowed) }.boxed()
    }
}

/// A server with that pod, for the API server's certificate and the tokens of [`Rbac`].
struct Kubelet(Server);

impl Kubelet {
    async fn start() -> Self {
        let access = AccessPolicy::for_common_names([API_SERVER_CLIENT.to_owned()])
            .with_delegated_auth(Arc::new(Rbac));
        Self(Server::start(Echo, access).await)
    }

    /// Sends a request as the API server, and reads the head of the response.
    async fn upgrade(
        &self,
        method: &str,
        path: &str,
        headers: &str,
    ) -> (String, TlsStream<TcpStream>) {
        let client = self.0.ca.client(API_SERVER_CLIENT);
        let stream = self.0.connect(Some(client)).await.unwrap();
        head(stream, method, path, headers).await
    }

    /// Sends a GET with a token, and reads the head of the response.
    async fn get_with_token(&self, path: &str, token: &str) -> String {
        let stream = self.0.connect(None).await.unwrap();
        let headers = format!("Authorization: Bearer {token}\r\n");
        head(stream, "GET", path, &headers).await.0
    }
}

async fn head(
    mut stream: TlsStream<TcpStream>,
    method: &str,
    path: &str,
    headers: &str,
) -> (String, TlsStream<TcpStream>) {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: kubelet\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(
            timeout(Duration::from_secs(10), stream.read_u8())
                .await
                .unwrap()
                .unwrap(),
        );
    }
    (String::from_utf8(head).unwrap().to_lowercase(), stream)
}

const WEBSOCKET: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
const SPDY: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
const ECHO: &str = "/exec/default/hello/main?command=cat&input=1&output=1";

#[tokio::test]
async fn websocket_session_works() {
    let server = Kubelet::start().await;
    let headers = format!("{WEBSOCKET}Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n");
    let (head, mut stream) = server.upgrade("GET", ECHO, &headers).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    assert!(
        head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="),
        "{head}"
    );
    assert!(
        head.contains("sec-websocket-protocol: v5.channel.k8s.io"),
        "{head}"
    );
    // "hello" on channel 0 and the end of channel 0, masked with zeros.
    stream.write_all(b"\x82\x86\0\0\0\0\0hello").await.unwrap();
    stream.write_all(b"\x82\x82\0\0\0\0\xff\0").await.unwrap();
    let mut response = Vec::new();
    timeout(Duration::from_secs(10), stream.read_to_end(&mut response))
        .await
        .unwrap()
        .unwrap();
    let status = br#"{"metadata":{},"status":"Success"}"#;
    let expected = [
        b"\x82\x01\x01\x82\x06\x01hello\x82",
        &[status.len() as u8 + 1, 3][..],
        status,
        b"\x88\x02\x03\xe8",
    ];
    assert_eq!(
        String::from_utf8_lossy(&response),
        String::from_utf8_lossy(&expected.concat())
    );
}

#[tokio::test]
async fn spdy_upgrade_works() {
    let server = Kubelet::start().await;
    let headers = format!("{SPDY}X-Stream-Protocol-Version: v4.channel.k8s.io\r\n");
    for path in [
        ECHO,
        "/exec/default/hello/1234/main?command=cat&input=1&output=1",
    ] {
        let (head, mut stream) = server.upgrade("POST", path, &headers).await;
        assert!(head.starts_with("http/1.1 101"), "{head}");
        assert!(
            head.contains("x-stream-protocol-version: v4.channel.k8s.io"),
            "{head}"
        );
        stream
            .write_all(b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x01")
            .await
            .unwrap();
        let mut ping = [0; 12];
        stream.read_exact(&mut ping).await.unwrap();
        assert_eq!(ping, *b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x01");
    }
    let headers = format!("{SPDY}X-Stream-Protocol-Version: portforward.k8s.io\r\n");
    let (head, _) = server
        .upgrade("POST", "/portForward/default/hello", &headers)
        .await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    let headers = format!("{WEBSOCKET}Sec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io\r\n");
    let (head, _) = server
        .upgrade("GET", "/portForward/default/hello/1234", &headers)
        .await;
    assert!(
        head.contains("sec-websocket-protocol: spdy/3.1+portforward.k8s.io"),
        "{head}"
    );
}

#[tokio::test]
async fn invalid_requests_are_rejected_before_the_upgrade() {
    let server = Kubelet::start().await;
    let v4 = format!("{SPDY}X-Stream-Protocol-Version: v4.channel.k8s.io\r\n");
    let v9 = format!("{SPDY}X-Stream-Protocol-Version: v9.channel.k8s.io\r\n");
    let w9 = format!("{WEBSOCKET}Sec-WebSocket-Protocol: v9.channel.k8s.io\r\n");
    for (method, path, headers, code, message) in [
        (
            "POST",
            "/exec/default/hello/main?command=cat",
            &v4[..],
            400,
            "you must specify at least 1 of stdin, stdout, stderr",
        ),
        (
            "POST",
            "/exec/default/bye/main?command=cat&input=1",
            &v4,
            404,
            "pod does not exist",
        ),
        (
            "POST",
            "/exec/default/hello/late?command=cat&input=1",
            &v4,
            500,
            r#"container not found ("late")"#,
        ),
        (
            "POST",
            "/exec/default/hello/other-uid/main?command=cat&input=1",
            &v4,
            500,
            r#"container not found ("main")"#,
        ),
        (
            "POST",
            "/attach/default/hello/late?input=1",
            &v4,
            500,
            "container late not found in pod hello_default",
        ),
        (
            "POST",
            "/attach/default/hello/terminal?error=1",
            &v4,
            500,
            "tty and stderr cannot both be true",
        ),
        ("POST", ECHO, "", 400, "Upgrade request required"),
        (
            "POST",
            ECHO,
            SPDY,
            400,
            "unable to upgrade: header X-Stream-Protocol-Version does not exist in request",
        ),
        (
            "POST",
            ECHO,
            &v9,
            403,
            "unable to upgrade: unable to negotiate protocol",
        ),
        (
            "GET",
            ECHO,
            &w9,
            403,
            "requested protocol(s) are not supported: [v9.channel.k8s.io]",
        ),
        (
            "POST",
            "/portForward/default/hello/other-uid",
            &v4,
            404,
            "pod not found",
        ),
        (
            "GET",
            "/portForward/default/hello",
            WEBSOCKET,
            400,
            r#"query parameter "port" is required"#,
        ),
    ] {
        let headers = format!("{headers}Accept: close\r\n");
        let (head, mut stream) = server.upgrade(method, path, &headers).await;
        assert!(
            head.starts_with(&format!("http/1.1 {code}")),
            "{path}: {head}"
        );
        let mut body = vec![0; message.len()];
        stream.read_exact(&mut body).await.unwrap();
        let body = String::from_utf8(body).unwrap();
        if !message.starts_with("requested") {
            assert_eq!(body, message);
        }
    }
}

#[tokio::test]
async fn tokens_are_authorized() {
    let server = Kubelet::start().await;
    let response = server.get_with_token("/healthz", "reader").await;
    assert!(response.starts_with("http/1.1 200"), "{response}");
    let response = server.get_with_token("/pods", "reader").await;
    assert!(response.starts_with("http/1.1 403"), "{response}");
    let response = server.get_with_token(ECHO, "reader").await;
    assert!(response.starts_with("http/1.1 403"), "{response}");
    let response = server.get_with_token("/healthz", "invalid").await;
    assert!(response.starts_with("http/1.1 401"), "{response}");
    // TLS rejects a certificate of another CA, although no certificate is allowed.
    let other_client = Ca::new("another CA").client(API_SERVER_CLIENT);
    let stream = server.0.connect(Some(other_client)).await;
    let rejected = match stream {
        Err(_) => true,
        Ok(mut stream) => stream.read_u8().await.is_err(),
    };
    assert!(rejected);
}

#[tokio::test]
async fn shutdown_ends_sessions() {
    let server = Kubelet::start().await;
    let (head, mut stream) = server.upgrade("GET", ECHO, WEBSOCKET).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    server.0.shutdown.cancel();
    let ended = timeout(Duration::from_secs(5), server.0.task)
        .await
        .unwrap();
    ended.unwrap().unwrap();
    let mut rest = Vec::new();
    let _ = timeout(Duration::from_secs(5), stream.read_to_end(&mut rest))
        .await
        .unwrap();
}

#[tokio::test]
async fn unauthenticated_connections_do_not_block_others() {
    let server = Kubelet::start().await;
    let headers = format!(
        "{WEBSOCKET}Sec-WebSocket-Protocol: v5.channel.k8s.io\r\nAuthorization: Bearer admin\r\n"
    );
    let stream = server.0.connect(None).await.unwrap();
    let (response, mut session) = head(stream, "GET", ECHO, &headers).await;
    assert!(response.starts_with("http/1.1 101"), "{response}");

    // Clients that stop before the handshake, after it, within a request, and after a 401.
    let mut clients = Vec::new();
    for number in 0..300 {
        if number % 4 == 0 {
            let silent = TcpStream::connect(server.0.address).await.unwrap();
            clients.push(Box::new(silent) as Box<dyn AsyncRead + Unpin>);
            continue;
        }
        let mut stream = server.0.connect(None).await.unwrap();
        match number % 4 {
            1 => {}
            2 => stream.write_all(b"GET /pods HTTP/1.1\r\nX").await.unwrap(),
            _ => {
                let (response, same) = head(stream, "GET", "/pods", "").await;
                assert!(response.starts_with("http/1.1 401"), "{response}");
                stream = same;
            }
        }
        clients.push(Box::new(stream));
    }
    let (response, _) = server.upgrade("GET", "/healthz", "").await;
    assert!(response.starts_with("http/1.1 200"), "{response}");
    let response = server.get_with_token("/healthz", "reader").await;
    assert!(response.starts_with("http/1.1 200"), "{response}");

    // The oldest of them are evicted; the authenticated session stays open.
    let mut received = Vec::new();
    for first in &mut clients[..150] {
        let closed = first.read_to_end(&mut received);
        let _ = timeout(Duration::from_secs(5), closed).await.unwrap();
    }
    for last in &mut clients[200..] {
        let closed = last.read_to_end(&mut received).now_or_never();
        assert!(closed.is_none());
    }
    session.write_all(b"\x82\x86\0\0\0\0\0hello").await.unwrap();
    session.flush().await.unwrap();
    let mut echo = [0; 11];
    timeout(Duration::from_secs(5), session.read_exact(&mut echo))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(echo, *b"\x82\x01\x01\x82\x06\x01hello");
}

#[tokio::test]
async fn unauthenticated_clients_time_out() {
    let server = Kubelet::start().await;
    let headers = "Authorization: Bearer reader\r\n";
    let stream = server.0.connect(None).await.unwrap();
    let (response, mut authenticated) = head(stream, "GET", "/healthz", headers).await;
    assert!(response.starts_with("http/1.1 200"), "{response}");
    assert_eq!(
        authenticated.read_u16().await.unwrap().to_be_bytes(),
        *b"ok"
    );

    let mut before = TcpStream::connect(server.0.address).await.unwrap();
    let mut after = server.0.connect(None).await.unwrap();
    let stream = server.0.connect(None).await.unwrap();
    let (response, mut rejected) = head(stream, "GET", "/healthz", "").await;
    assert!(response.starts_with("http/1.1 401"), "{response}");
    tokio::time::pause();
    let mut rest = Vec::new();
    for unauthenticated in [
        &mut before as &mut (dyn AsyncRead + Unpin),
        &mut after,
        &mut rejected,
    ] {
        let closed = timeout(
            Duration::from_secs(11),
            unauthenticated.read_to_end(&mut rest),
        );
        let _ = closed.await.unwrap();
    }
    assert_eq!(rest, b"Unauthorized");
    // The time-out does not apply to the authenticated client.
    assert!(authenticated.read_u8().now_or_never().is_none());
    tokio::time::resume();
    let (response, _) = head(authenticated, "GET", "/healthz", headers).await;
    assert!(response.starts_with("http/1.1 200"), "{response}");
}
