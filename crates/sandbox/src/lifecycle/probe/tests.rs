//! Tests of probes with servers in this process.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::Probe;
use pod_protocol::Problem;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{ProbeResult, ProbedContainer, probe_once};
use crate::container_runtime::{
    ContainerRuntime, ExecResult, ImageProblem, ImageRequest, PodImage, PodNetwork, StartFailure,
    StartRequest, StartedContainer,
};

/// A pod in the host's network, without containers.
struct HostNetworkRuntime;

impl ContainerRuntime for HostNetworkRuntime {
    async fn set_up(&self) -> Result<PodNetwork, Problem> {
        Ok(PodNetwork::default())
    }
    async fn ensure_image(&self, _: &ImageRequest) -> Result<PodImage, ImageProblem> {
        Ok(PodImage::default())
    }
    fn image_volumes(&self, _: &k8s_openapi::api::core::v1::Container) -> Vec<ImageRequest> {
        Vec::new()
    }
    async fn start(&self, _: &StartRequest) -> Result<StartedContainer, StartFailure> {
        Err(problem().into())
    }
    fn signal(&self, _: &str, _: i32) {}
    async fn exec(&self, _: &str, _: &[String], _: Duration) -> Result<ExecResult, Problem> {
        Err(problem())
    }
    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream> {
        TcpStream::connect((address, port)).await
    }
    async fn termination_message(&self, _: &StartRequest, _: bool) -> Option<String> {
        None
    }
    async fn tear_down(&self) {}
}

fn problem() -> Problem {
    Problem::new("Error", "no containers")
}

async fn run(probe: Value) -> ProbeResult {
    let probe: Probe = serde_json::from_value(probe).expect("a probe");
    let container = ProbedContainer {
        spec: serde_json::from_value(
            json!({"name": "c", "ports": [{"name": "none", "containerPort": 1}]}),
        )
        .expect("a container"),
        id: "id".to_owned(),
        ip: Some(IpAddr::from([127, 0, 0, 1])),
    };
    let local = tokio::task::LocalSet::new();
    local
        .run_until(probe_once(&HostNetworkRuntime, &container, &probe))
        .await
}

/// Responds to each connection with the next of these, and returns the requests.
async fn serve(responses: Vec<String>) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let server = tokio::spawn(async move {
        let mut requests = Vec::new();
        for response in responses {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let byte = stream.read_u8().await.expect("a request");
                request.push(byte);
            }
            requests.push(String::from_utf8(request).expect("text"));
            let response = response.replace("PORT", &port.to_string());
            stream
                .write_all(response.as_bytes())
                .await
                .expect("to respond");
        }
        requests
    });
    (port, server)
}

fn response(head: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {head}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn http_status_decides_result() {
    for (head, want) in [
        ("200 OK", ProbeResult::Success),
        ("204 No Content", ProbeResult::Success),
        (
            "304 Not Modified",
            ProbeResult::Warning("Probe terminated redirects, Response body: ".to_owned()),
        ),
        (
            "404 Not Found",
            ProbeResult::Failure("HTTP probe failed with statuscode: 404".to_owned()),
        ),
        (
            "503 Unavailable",
            ProbeResult::Failure("HTTP probe failed with statuscode: 503".to_owned()),
        ),
    ] {
        let (port, server) = serve(vec![response(head, "")]).await;
        assert_eq!(run(json!({"httpGet": {"port": port}})).await, want);
        server.await.expect("a server");
    }
}

#[tokio::test]
async fn http_headers_are_sent() {
    let (port, server) = serve(vec![response("200 OK", "")]).await;
    let result = run(
        json!({"httpGet": {"port": port, "path": "a?b=c", "httpHeaders": [
            {"name": "Host", "value": "example.org"},
            {"name": "X-Custom", "value": "1"},
            {"name": "X-Custom", "value": "2"},
            {"name": "Accept", "value": ""},
        ]}}),
    )
    .await;
    assert_eq!(result, ProbeResult::Success);
    let request = server.await.expect("a server").remove(0);
    let mut lines: Vec<&str> = request.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.remove(0), "GET /a?b=c HTTP/1.1");
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "connection: close",
            "host: example.org",
            "user-agent: kube-probe/1.37",
            "x-custom: 1",
            "x-custom: 2"
        ]
    );
}

#[tokio::test]
async fn redirect_within_host_is_followed() {
    let (port, server) = serve(vec![
        response("302 Found\r\nLocation: /b", ""),
        response("301 Moved\r\nLocation: http://127.0.0.1:PORT/c", ""),
        response("200 OK", "fine"),
    ])
    .await;
    assert_eq!(
        run(json!({"httpGet": {"port": port, "path": "/a"}})).await,
        ProbeResult::Success
    );
    let requests = server.await.expect("a server");
    let first: Vec<_> = requests
        .iter()
        .filter_map(|request| request.lines().next())
        .collect();
    assert_eq!(
        first,
        ["GET /a HTTP/1.1", "GET /b HTTP/1.1", "GET /c HTTP/1.1"]
    );
}

#[tokio::test]
async fn redirect_to_other_host_is_warning() {
    let (port, _server) = serve(vec![response(
        "302 Found\r\nLocation: http://example.org/",
        "gone",
    )])
    .await;
    assert_eq!(
        run(json!({"httpGet": {"port": port}})).await,
        ProbeResult::Warning("Probe terminated redirects, Response body: gone".to_owned())
    );
}

#[tokio::test]
async fn endless_redirects_fail() {
    let (port, _server) = serve(vec![response("302 Found\r\nLocation: /", ""); 20]).await;
    assert_eq!(
        run(json!({"httpGet": {"port": port}})).await,
        ProbeResult::Failure(format!(
            "Get \"http://127.0.0.1:{port}/\": stopped after 10 redirects"
        ))
    );
}

#[tokio::test]
async fn connection_refused_is_failure() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
    assert_eq!(
        run(json!({"httpGet": {"port": port}})).await,
        ProbeResult::Failure(format!("Get \"http://127.0.0.1:{port}/\": {refused}"))
    );
    assert_eq!(
        run(json!({"tcpSocket": {"port": port}})).await,
        ProbeResult::Failure(refused.clone())
    );
    assert_eq!(
        run(json!({"grpc": {"port": port}})).await,
        ProbeResult::Failure(format!(
            "error: failed to connect service at \"127.0.0.1:{port}\": {refused}"
        ))
    );
    assert!(matches!(
        run(json!({"tcpSocket": {"port": "missing"}})).await,
        ProbeResult::Unknown(_)
    ));
    assert!(matches!(
        run(json!({"exec": {"command": ["x"]}})).await,
        ProbeResult::Unknown(_)
    ));
}

#[tokio::test]
async fn silent_server_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    assert_eq!(
        run(json!({"tcpSocket": {"port": port}})).await,
        ProbeResult::Success
    );
    assert_eq!(
        run(json!({"httpGet": {"port": port, "path": "/x"}, "timeoutSeconds": 1})).await,
        ProbeResult::Failure(format!(
            "Get \"http://127.0.0.1:{port}/x\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        ))
    );
    assert_eq!(
        run(json!({"grpc": {"port": port}})).await,
        ProbeResult::Failure("timeout: health rpc did not complete within 1s".to_owned())
    );
    drop(listener);
}

fn acceptor(h2: bool) -> tokio_rustls::TlsAcceptor {
    let own =
        rcgen::generate_simple_self_signed(vec!["elsewhere".to_owned()]).expect("a certificate");
    let key =
        rustls_pki_types::PrivateKeyDer::try_from(own.signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .expect("a configuration");
    if h2 {
        config.alpn_protocols = vec![b"h2".to_vec()];
    }
    tokio_rustls::TlsAcceptor::from(Arc::new(config))
}

#[tokio::test]
async fn https_certificate_is_not_verified() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let mut stream = acceptor(false).accept(stream).await.expect("TLS");
        let mut request = [0; 1024];
        let read = stream.read(&mut request).await.expect("a request");
        assert!(request[..read].starts_with(b"GET /x HTTP/1.1"));
        stream
            .write_all(response("200 OK", "fine").as_bytes())
            .await
            .expect("to respond");
        stream.shutdown().await.expect("to end");
    });
    let result = run(json!({"httpGet": {"port": port, "path": "/x", "scheme": "HTTPS"}})).await;
    assert_eq!(result, ProbeResult::Success);
    server.await.expect("a server");
}

/// A health service with the services `healthy`, `unhealthy` and `unimplemented`.
async fn health(
    request: http::Request<Incoming>,
) -> Result<
    Response<impl hyper::body::Body<Data = Bytes, Error = std::convert::Infallible>>,
    hyper::Error,
> {
    assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
    assert_eq!(request.headers()["content-type"], "application/grpc");
    let message = request.into_body().collect().await?.to_bytes();
    let service = String::from_utf8_lossy(message.get(7..).unwrap_or_default()).into_owned();
    let (message, status): (&'static [u8], &str) = match service.as_str() {
        "healthy" | "" => (&[0, 0, 0, 0, 2, 8, 1], "0"),
        "unhealthy" => (&[0, 0, 0, 0, 2, 8, 2], "0"),
        "unimplemented" => (&[], "12"),
        _ => (&[], "5"),
    };
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", status.parse().expect("a value"));
    trailers.insert("grpc-message", "test message".parse().expect("a value"));
    let frames = futures::stream::iter([
        Ok(Frame::data(Bytes::from_static(message))),
        Ok(Frame::trailers(trailers)),
    ]);
    Ok(Response::new(StreamBody::new(frames)))
}

#[tokio::test]
async fn grpc_health_decides_result() {
    for tls in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let server = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                if tls {
                    let stream = acceptor(true).accept(stream).await.expect("TLS");
                    let _ = builder
                        .serve_connection(TokioIo::new(stream), service_fn(health))
                        .await;
                } else {
                    let _ = builder
                        .serve_connection(TokioIo::new(stream), service_fn(health))
                        .await;
                }
            }
        });
        let mode = if tls { "TLS" } else { "Plaintext" };
        for (service, want) in [
            ("", ProbeResult::Success),
            ("healthy", ProbeResult::Success),
            ("unhealthy", ProbeResult::Failure("service unhealthy (responded with \"NOT_SERVING\")".to_owned())),
            (
                "unimplemented",
                ProbeResult::Failure(
                    "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): test message"
                        .to_owned(),
                ),
            ),
            (
                "unknown",
                ProbeResult::Failure(
                    "error: health rpc probe failed: rpc error: code = NotFound desc = test message".to_owned(),
                ),
            ),
        ] {
            let probe = json!({"grpc": {"port": port, "service": service, "mode": mode}, "timeoutSeconds": 5});
            assert_eq!(run(probe).await, want, "{service} {mode}");
        }
        server.abort();
    }
}

#[tokio::test]
async fn http2_without_tls_is_supported() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let service = service_fn(async |request: http::Request<Incoming>| {
            assert_eq!(request.uri().path(), "/x");
            Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from_static(b"fine"))))
        });
        let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _ = builder
            .serve_connection(TokioIo::new(stream), service)
            .await;
    });
    let probe = json!({"httpGet": {"port": port, "path": "/x", "protocol": "HTTP2"}});
    assert_eq!(run(probe).await, ProbeResult::Success);
    server.await.expect("a server");
}
