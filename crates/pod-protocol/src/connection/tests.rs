//! Both ends, over real sockets.

use std::cell::RefCell;
use std::future::pending;
use std::net::Ipv4Addr;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::Instant;

use super::*;
use crate::streams::{FrameReader, FrameStream};
use crate::{
    AttachQuery, Bundle, ExecQuery, LogQuery, PROTOCOL_VERSION, PodState, RequestError,
    RequestErrorKind, SandboxCredential, SandboxHello, SandboxId, SandboxWelcome, Stop,
};

/// A service that records its calls.
struct RecordingService {
    calls: RefCell<Vec<String>>,
    state: watch::Sender<PodState>,
}

impl RecordingService {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            calls: RefCell::default(),
            state: watch::Sender::new(state(0)),
        })
    }

    fn record(&self, call: impl Into<String>) {
        self.calls.borrow_mut().push(call.into());
    }
}

impl SandboxService for RecordingService {
    fn put_bundle(&self, bundle: Bundle) {
        self.record(format!("bundle for {}", bundle.node.name));
    }

    fn stop(&self, stop: Stop) {
        self.record(format!("stop in {}", stop.grace_seconds));
    }

    fn dismiss(&self) {
        self.record("dismiss");
    }

    fn retire(&self) {
        self.record("retire");
    }

    fn state(&self) -> watch::Receiver<PodState> {
        self.state.subscribe()
    }

    async fn logs(&self, query: LogQuery) -> Result<LogByteStream, RequestError> {
        match query.container.as_str() {
            "hello" => {
                let lines = ["one\n", "two\n"].map(|line| Ok(Bytes::from_static(line.as_bytes())));
                Ok(stream::iter(lines).boxed())
            }
            "broken" => {
                let torn = [
                    Ok(Bytes::from_static(b"half")),
                    Err(std::io::Error::other("disk")),
                ];
                Ok(stream::iter(torn).boxed())
            }
            "endless" => {
                let block = Bytes::from(vec![b'x'; 64 * 1024]);
                Ok(stream::repeat_with(move || Ok(block.clone())).boxed())
            }
            other => Err(RequestError {
                kind: RequestErrorKind::NotFound,
                message: format!("container {other:?} has no log"),
            }),
        }
    }

    async fn exec(&self, _: ExecQuery, _: FrameReader) -> Result<FrameStream, RequestError> {
        Err(RequestError {
            kind: RequestErrorKind::Failed,
            message: "executable file not found in $PATH".to_owned(),
        })
    }

    async fn attach(&self, _: AttachQuery, _: FrameReader) -> Result<FrameStream, RequestError> {
        Err(RequestError {
            kind: RequestErrorKind::NotFound,
            message: "nothing to attach to".to_owned(),
        })
    }

    async fn port_forward(&self, port: u16) -> Result<TcpStream, RequestError> {
        TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .await
            .map_err(|error| RequestError {
                kind: RequestErrorKind::Failed,
                message: error.to_string(),
            })
    }
}

fn state(serial: u64) -> PodState {
    PodState {
        observed_generation: i64::try_from(serial).ok(),
        ..PodState::default()
    }
}

fn serial(state: &PodState) -> i64 {
    state.observed_generation.unwrap_or(-1)
}

fn hello() -> SandboxHello {
    SandboxHello {
        version: PROTOCOL_VERSION,
        uid: "1234".to_owned(),
        id: SandboxId::new("1234/1"),
        credential: SandboxCredential::LaunchToken("secret".to_owned()),
    }
}

fn bundle() -> Bundle {
    let mut bundle: Bundle = serde_json::from_value(serde_json::json!({
        "pod": {}, "containers": {}, "volumes": {}, "pull_credentials": [], "previous_statuses": [],
        "node": { "name": "", "cluster_dns": [], "cluster_domain": "" }
    }))
    .unwrap();
    bundle.node.name = "node1".to_owned();
    bundle
}

/// Accepts the launch token, and then the key.
fn authenticate(hello: &SandboxHello) -> Option<SandboxWelcome> {
    match &hello.credential {
        SandboxCredential::LaunchToken(token) if token == "secret" => Some(SandboxWelcome {
            key: Some("key".to_owned()),
        }),
        SandboxCredential::Key(key) if key == "key" => Some(SandboxWelcome::default()),
        _ => None,
    }
}

/// A client of a service that is served until the test ends.
async fn connect(pod: &Rc<RecordingService>) -> SandboxClient {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let pod = Rc::clone(pod);
    tokio::task::spawn_local(async move { serve(theirs, &mut hello(), pod, pending()).await });
    let (hello, client) = accept(ours, authenticate).await.unwrap();
    assert_eq!(hello.uid, "1234");
    client
}

async fn local<T>(test: impl Future<Output = T>) -> T {
    LocalSet::new().run_until(test).await
}

#[tokio::test]
async fn requests_reach_the_service() {
    local(async {
        let pod = RecordingService::new();
        let client = connect(&pod).await;
        client.put_bundle(&bundle()).await.unwrap();
        let stop = Stop {
            grace_seconds: 30,
            failure: None,
        };
        client.stop(&stop).await.unwrap();
        client.retire().await.unwrap();
        client.dismiss().await.unwrap();
        assert_eq!(
            *pod.calls.borrow(),
            ["bundle for node1", "stop in 30", "retire", "dismiss"]
        );
    })
    .await;
}

#[tokio::test]
async fn large_bundle_arrives() {
    local(async {
        let pod = RecordingService::new();
        let client = connect(&pod).await;
        let mut bundle = bundle();
        let content = "x".repeat(9_000_000);
        bundle.volumes.insert("v".to_owned(), content.into());
        client.put_bundle(&bundle).await.unwrap();
        assert_eq!(pod.calls.borrow().len(), 1);
    })
    .await;
}

#[tokio::test]
async fn logs_and_errors_arrive() {
    local(async {
        let client = connect(&RecordingService::new()).await;
        let ask = |container: &str| {
            let container = container.to_owned();
            let client = client.clone();
            async move {
                let query = LogQuery {
                    container,
                    ..LogQuery::default()
                };
                let log = client.logs(&query).await?;
                let pieces: Vec<Bytes> = log.try_collect().await?;
                Ok::<_, ConnectionError>(pieces.concat())
            }
        };
        assert_eq!(ask("hello").await.unwrap(), b"one\ntwo\n");
        assert!(matches!(
            ask("broken").await,
            Err(ConnectionError::Lost { .. })
        ));
        let error = ask("absent").await.unwrap_err();
        assert_eq!(error.to_string(), r#"container "absent" has no log"#);
        // A broken stream does not affect others.
        assert_eq!(ask("hello").await.unwrap(), b"one\ntwo\n");
    })
    .await;
}

#[tokio::test]
async fn slow_reader_skips_states_in_order() {
    local(async {
        let pod = RecordingService::new();
        let client = connect(&pod).await;
        let mut states = pin!(client.states().await.unwrap());
        assert_eq!(serial(&states.next().await.unwrap().unwrap()), 0);

        let writer = async {
            for serial in 1..=5000 {
                pod.state.send_replace(state(serial));
                if serial % 7 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        };
        let reader = async {
            let (mut count, mut last) = (0, 0);
            while last < 5000 {
                let state = states.next().await.unwrap().unwrap();
                assert!(serial(&state) > last);
                last = serial(&state);
                count += 1;
                if count % 10 == 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            count
        };
        let ((), count) = tokio::join!(writer, reader);
        assert!(count < 2500, "no state was skipped: {count}");
    })
    .await;
}

#[tokio::test]
async fn slow_log_readers_do_not_delay_states() {
    local(async {
        let pod = RecordingService::new();
        let client = connect(&pod).await;
        let query = LogQuery {
            container: "endless".to_owned(),
            ..LogQuery::default()
        };
        let mut readers = Vec::new();
        for _ in 0..40 {
            let mut log = client.logs(&query).await.unwrap().boxed();
            log.next().await.unwrap().unwrap();
            readers.push(log);
        }
        let mut states = pin!(client.states().await.unwrap());
        for serial in 1..=50 {
            states.next().await.unwrap().unwrap();
            pod.state.send_replace(state(serial));
        }
    })
    .await;
}

#[tokio::test]
async fn state_stream_ends_with_the_connection() {
    local(async {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pod = RecordingService::new();
        let (done, end) = oneshot::channel::<()>();
        let serving = tokio::task::spawn_local({
            let pod = Rc::clone(&pod);
            async move {
                serve(theirs, &mut hello(), pod, async {
                    let _ = end.await;
                })
                .await
            }
        });
        let (_, client) = accept(ours, authenticate).await.unwrap();
        let mut states = pin!(client.states().await.unwrap());
        states.next().await.unwrap().unwrap();

        // The last state is sent even if it changes at the same moment as the service ends.
        pod.state.send_replace(state(9));
        done.send(()).unwrap();
        let last = states.next().await.unwrap().unwrap();
        assert_eq!(serial(&last), 9);
        assert!(states.next().await.is_none());
        assert_eq!(serving.await.unwrap(), ServeEnd::Done);
        tokio::time::timeout(Duration::from_secs(5), async {
            while !client.is_closed() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .unwrap();
        let error = client.dismiss().await.unwrap_err();
        assert!(error.to_string().contains("1234"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn unauthenticated_sandbox_is_rejected() {
    local(async {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut unknown = SandboxHello {
            credential: SandboxCredential::LaunchToken("guessed".to_owned()),
            ..hello()
        };
        let serving = tokio::task::spawn_local(async move {
            serve(theirs, &mut unknown, RecordingService::new(), pending()).await
        });
        let error = accept(ours, authenticate).await.unwrap_err();
        assert!(
            matches!(error, HelloError::Unauthenticated { .. }),
            "{error}"
        );
        assert!(!error.to_string().contains("guessed"));
        assert_eq!(serving.await.unwrap(), ServeEnd::NoRequest);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn hello_must_be_short_valid_and_timely() {
    let rejected = |sent: Vec<u8>, close: bool| async move {
        let (mut theirs, ours) = tokio::io::duplex(64 * 1024);
        theirs.write_all(&sent).await.unwrap();
        let kept = (!close).then_some(theirs);
        let error = accept(ours, authenticate).await.unwrap_err();
        drop(kept);
        error
    };
    assert!(matches!(
        rejected(b"GET / HTTP/1.1\r\n\r\n".to_vec(), false).await,
        HelloError::Invalid(_)
    ));
    assert!(matches!(
        rejected(vec![b'x'; 10_000], false).await,
        HelloError::TooLong
    ));
    assert!(matches!(
        rejected(vec![0xff; 100], true).await,
        HelloError::Closed(_)
    ));
    assert!(matches!(
        rejected(Vec::new(), true).await,
        HelloError::Closed(_)
    ));
    let begun = Instant::now();
    assert!(matches!(
        rejected(b"{".to_vec(), false).await,
        HelloError::Timeout
    ));
    assert_eq!(begun.elapsed().as_secs(), 5);
    let other = br#"{"version":7,"token":"secret","uid":"u"}"#;
    assert!(matches!(
        rejected([other.as_slice(), b"\n"].concat(), false).await,
        HelloError::VersionMismatch { theirs: 7, .. }
    ));
}

#[tokio::test]
async fn invalid_http2_ends_the_connection() {
    local(async {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"{}\n").await.unwrap();
        ours.write_all(&[b'z'; 4096]).await.unwrap();
        assert_eq!(
            serve(theirs, &mut hello(), RecordingService::new(), pending()).await,
            ServeEnd::NoRequest
        );
        let mut sent = Vec::new();
        // The unread input makes it a reset.
        let _ = ours.read_to_end(&mut sent).await;
        let version = format!("{{\"version\":{PROTOCOL_VERSION}");
        assert!(sent.starts_with(version.as_bytes()));
    })
    .await;
}

/// A sandbox that serves, and its client.
async fn serving_sandbox() -> (JoinHandle<ServeEnd>, SandboxClient) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let serving = tokio::task::spawn_local(async move {
        serve(theirs, &mut hello(), RecordingService::new(), pending()).await
    });
    let (_, client) = accept(ours, authenticate).await.unwrap();
    (serving, client)
}

/// A log that does not end by itself, after its first bytes.
async fn endless_log(client: &SandboxClient) -> BoxStream<'static, Result<Bytes, ConnectionError>> {
    let query = LogQuery {
        container: "endless".to_owned(),
        ..LogQuery::default()
    };
    let mut log = client.logs(&query).await.unwrap().boxed();
    log.next().await.unwrap().unwrap();
    log
}

#[tokio::test]
async fn killed_sandbox_breaks_log_streams() {
    local(async {
        let (serving, client) = serving_sandbox().await;
        let mut log = endless_log(&client).await;
        serving.abort();
        let error = loop {
            match log.next().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break error,
                None => panic!("a truncated log ended without an error"),
            }
        };
        assert!(error.to_string().contains("1234"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn closing_breaks_streams_of_the_connection() {
    local(async {
        let (serving, client) = serving_sandbox().await;
        let mut log = endless_log(&client).await;
        client.close();
        assert_eq!(serving.await.unwrap(), ServeEnd::ConnectionLost);
        while let Some(Ok(_)) = log.next().await {}
    })
    .await;
}

async fn next_client(listener: &UnixListener) -> SandboxClient {
    let (io, _) = listener.accept().await.unwrap();
    accept(io, authenticate).await.unwrap().1
}

#[tokio::test]
async fn sandbox_reconnects_to_a_new_kubelet() {
    local(async {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("kubelet.sock");
        let pod = RecordingService::new();
        let (done, end) = oneshot::channel::<()>();
        let staying = tokio::task::spawn_local({
            let (socket, pod) = (socket.clone(), Rc::clone(&pod));
            async move {
                let end = async {
                    let _ = end.await;
                };
                let kubelet = KubeletEndpoint::Unix(socket);
                let mut hello = hello();
                let end = stay_connected(&kubelet, &mut hello, pod, Duration::from_secs(60), end);
                let end = end.await;
                assert_eq!(hello.credential, SandboxCredential::Key("key".to_owned()));
                end
            }
        });
        // At first no kubelet listens.
        tokio::time::sleep(Duration::from_millis(120)).await;
        for round in 1..=3 {
            let listener = UnixListener::bind(&socket).unwrap();
            let client = next_client(&listener).await;
            let mut states = pin!(client.states().await.unwrap());
            let seen = states.next().await.unwrap().unwrap();
            assert_eq!(serial(&seen), round - 1);
            pod.state.send_replace(state(round.try_into().unwrap()));
            std::fs::remove_file(&socket).unwrap();
        }
        let listener = UnixListener::bind(&socket).unwrap();
        let client = next_client(&listener).await;
        client.dismiss().await.unwrap();
        done.send(()).unwrap();
        assert_eq!(staying.await.unwrap(), StayConnectedEnd::Done);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn sandbox_gives_up_without_a_kubelet() {
    let until_lost = |socket: &Path| {
        let kubelet = KubeletEndpoint::Unix(socket.to_owned());
        async move {
            let begun = Instant::now();
            let timeout = Duration::from_secs(90);
            let end = stay_connected(
                &kubelet,
                &mut hello(),
                RecordingService::new(),
                timeout,
                pending(),
            )
            .await;
            (end, begun.elapsed().as_secs())
        }
    };
    local(async {
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("absent.sock");
        assert_eq!(
            until_lost(&absent).await,
            (StayConnectedEnd::KubeletLost, 90)
        );
        // A listener that never accepts.
        let silent = dir.path().join("silent.sock");
        let _listener = UnixListener::bind(&silent).unwrap();
        assert_eq!(
            until_lost(&silent).await,
            (StayConnectedEnd::KubeletLost, 90)
        );
    })
    .await;
}

#[tokio::test]
async fn errors_have_their_messages() {
    local(async {
        let client = connect(&RecordingService::new()).await;
        let error = client
            .exec(&ExecQuery::default(), stream::empty())
            .await
            .unwrap_err();
        assert!(
            error.to_string().contains("executable file not found"),
            "{error}"
        );
        let error = client
            .attach(&AttachQuery::default(), stream::empty())
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "nothing to attach to");
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let error = client
            .port_forward(port, stream::empty())
            .await
            .map(drop)
            .unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn forwarded_port_directions_end_separately() {
    local(async {
        let client = connect(&RecordingService::new()).await;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let served = tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut all = Vec::new();
            connection.read_to_end(&mut all).await.unwrap();
            // Sent after the client's end-of-file.
            connection
                .write_all(format!("{} bytes", all.len()).as_bytes())
                .await
                .unwrap();
        });
        let blocks = stream::iter(vec![Bytes::from(vec![1; 1 << 20]); 16]);
        let forwarded = client.port_forward(port, blocks).await.unwrap();
        let answer: Vec<Bytes> = forwarded.try_collect().await.unwrap();
        assert_eq!(answer.concat(), b"16777216 bytes");
        served.await.unwrap();
    })
    .await;
}

/// The certificates of a kubelet and of a sandbox, each with the CA of the other.
fn identities(name: &str) -> (TransportIdentity, TransportIdentity) {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(vec![]).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let identity = || {
        let key = rcgen::KeyPair::generate().unwrap();
        let leaf = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        TransportIdentity {
            ca_pem: ca_pem.clone(),
            cert_pem: leaf.signed_by(&key, &issuer).unwrap().pem(),
            key_pem: key.serialize_pem(),
        }
    };
    (identity(), identity())
}

async fn tls_listener(identity: &TransportIdentity) -> (TransportListener, std::net::SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (TransportListener::tls(listener, identity).unwrap(), address)
}

#[tokio::test]
async fn connection_works_over_mutual_tls() {
    local(async {
        let (kubelet, sandbox) = identities("kubelet");
        let (listener, address) = tls_listener(&kubelet).await;
        let endpoint = KubeletEndpoint::Tls {
            addresses: vec![address],
            server_name: "kubelet".to_owned(),
            identity: sandbox,
        };
        let pod = RecordingService::new();
        let (done, end) = oneshot::channel::<()>();
        let staying = tokio::task::spawn_local({
            let pod = Rc::clone(&pod);
            async move {
                let end = async {
                    let _ = end.await;
                };
                stay_connected(&endpoint, &mut hello(), pod, Duration::from_secs(60), end).await
            }
        });
        for credential in ["LaunchToken", "Key"] {
            let stream = listener.accept().await.unwrap().establish().await.unwrap();
            let (hello, client) = accept(stream, authenticate).await.unwrap();
            assert_eq!(format!("{:?}", hello.credential), credential);
            client.put_bundle(&bundle()).await.unwrap();
        }
        assert_eq!(
            *pod.calls.borrow(),
            ["bundle for node1", "bundle for node1"]
        );
        done.send(()).unwrap();
        assert_eq!(staying.await.unwrap(), StayConnectedEnd::Done);
    })
    .await;
}

#[tokio::test]
async fn certificates_of_another_ca_are_rejected() {
    let (kubelet, _) = identities("kubelet");
    let (_, identity_of_other_ca) = identities("kubelet");
    let (listener, address) = tls_listener(&kubelet).await;
    let endpoint = |identity| KubeletEndpoint::Tls {
        addresses: vec![address],
        server_name: "kubelet".to_owned(),
        identity,
    };
    // The sandbox does not trust the kubelet.
    let accepted = async { listener.accept().await.unwrap().establish().await };
    let connecting = endpoint(identity_of_other_ca.clone());
    let (accepted, connected) = tokio::join!(accepted, connecting.connect());
    assert!(accepted.is_err() && connected.is_err());
    // The kubelet does not trust the sandbox.
    let accepted = async { listener.accept().await.unwrap().establish().await };
    let connecting = endpoint(TransportIdentity {
        ca_pem: kubelet.ca_pem.clone(),
        ..identity_of_other_ca
    });
    let (accepted, _) = tokio::join!(accepted, connecting.connect());
    assert!(accepted.is_err());
}
