//! Exec and attach sessions with every version of the protocols.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::spdy::test_client::{Received, SpdyTestClient};
use crate::testing::TestPods;
use crate::websocket;

const ALL: RequestedStreams = RequestedStreams {
    stdin: true,
    stdout: true,
    stderr: true,
    tty: false,
};
const TERMINAL: RequestedStreams = RequestedStreams {
    stdin: true,
    stdout: true,
    stderr: false,
    tty: true,
};

fn checked(kind: RemoteCommandKind, command: &[&str], streams: RequestedStreams) -> CheckedRequest {
    CheckedRequest {
        kind,
        uid: "1234".to_owned(),
        container: "c".to_owned(),
        has_tty: streams.tty,
        options: RemoteCommandOptions {
            streams,
            command: command.iter().map(|word| (*word).to_owned()).collect(),
        },
    }
}

fn version<T: Copy>(protocols: &[(&str, T)], requested: &str) -> T {
    let found = protocols.iter().find(|(name, _)| *name == requested);
    found.unwrap().1
}

/// The bytes received, by stream.
type Outputs = HashMap<&'static str, Vec<u8>>;

fn status(outputs: &Outputs) -> Value {
    serde_json::from_slice(&outputs["error"]).unwrap()
}

/// A client over SPDY, with one stream per type.
struct Spdy {
    io: DuplexStream,
    client: SpdyTestClient,
    streams: HashMap<&'static str, u32>,
    pods: Arc<TestPods>,
    server: JoinHandle<()>,
}

impl Spdy {
    async fn start(protocol: &str, command: &[&str], requested: RequestedStreams) -> Self {
        Self::start_kind(RemoteCommandKind::Exec, protocol, command, requested).await
    }

    async fn start_kind(
        kind: RemoteCommandKind,
        protocol: &str,
        command: &[&str],
        requested: RequestedStreams,
    ) -> Self {
        let (io, served) = duplex(16 * 1024);
        let pods = Arc::new(TestPods::default());
        let version = version(spdy::COMMAND_SPDY_PROTOCOLS, protocol);
        let server = tokio::spawn(serve_spdy(
            served,
            StreamTimeouts::default(),
            requested,
            version,
            checked(kind, command, requested),
            Arc::clone(&pods) as _,
        ));
        let mut this = Self {
            io,
            client: SpdyTestClient::new(),
            streams: HashMap::new(),
            pods,
            server,
        };
        let stream_types = [
            ("error", true),
            ("stdin", requested.stdin),
            ("stdout", requested.stdout),
            ("stderr", requested.stderr),
            ("resize", requested.tty && !protocol.starts_with("v2")),
        ];
        for (stream_type, requested) in stream_types {
            if requested {
                this.open(stream_type).await;
            }
        }
        this
    }

    async fn open(&mut self, stream_type: &'static str) {
        let (stream, bytes) = self.client.open(&[("streamtype", stream_type)]);
        self.streams.insert(stream_type, stream);
        self.io.write_all(&bytes).await.unwrap();
    }

    async fn send(&mut self, stream_type: &str, bytes: &[u8], fin: bool) {
        let bytes = self.client.data(self.streams[stream_type], bytes, fin);
        self.io.write_all(&bytes).await.unwrap();
    }

    /// Reads to the end of the connection, and checks that all streams were closed.
    async fn outputs(mut self) -> Outputs {
        let mut bytes = Vec::new();
        let read = timeout(Duration::from_secs(20), self.io.read_to_end(&mut bytes));
        read.await.unwrap().unwrap();
        let received = self.client.receive(&bytes);
        assert_eq!(received.last(), Some(&Received::GoAway));
        let mut outputs: Outputs = HashMap::new();
        let type_of = |stream: &u32| {
            let mut all = self.streams.iter();
            *all.find(|(_, id)| *id == stream).unwrap().0
        };
        for received in &received {
            if let Received::Data { stream, bytes } = received {
                outputs.entry(type_of(stream)).or_default().extend(bytes);
            }
        }
        for stream_type in ["stdout", "stderr", "error"] {
            if let Some(stream) = self.streams.get(stream_type) {
                assert!(
                    received.contains(&Received::Finished(*stream)),
                    "{stream_type} has no end"
                );
            }
        }
        drop(self.io);
        self.server.await.unwrap();
        outputs
    }
}

#[tokio::test]
async fn spdy_v4_reports_exit_code() {
    let outputs = Spdy::start("v4.channel.k8s.io", &["both"], ALL)
        .await
        .outputs()
        .await;
    assert_eq!(outputs["stdout"], b"out");
    assert_eq!(outputs["stderr"], b"err");
    assert_eq!(status(&outputs)["details"]["causes"][0]["message"], "3");
}

#[tokio::test]
async fn spdy_before_v4_reports_text() {
    for protocol in ["v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"] {
        let outputs = Spdy::start(protocol, &["both"], ALL).await.outputs().await;
        assert_eq!(outputs["stdout"], b"out");
        assert_eq!(
            outputs["error"],
            b"command terminated with non-zero exit code: command terminated with exit code 3"
        );
        let outputs = Spdy::start(protocol, &["exit", "0"], ALL)
            .await
            .outputs()
            .await;
        assert!(!outputs.contains_key("error"));
    }
}

#[tokio::test]
async fn end_of_stdin_reaches_the_process() {
    let mut client = Spdy::start("v4.channel.k8s.io", &["cat"], ALL).await;
    client.send("stdin", b"hello ", false).await;
    client.send("stdin", b"world", true).await;
    let outputs = client.outputs().await;
    assert_eq!(outputs["stdout"], b"hello world");
    assert_eq!(status(&outputs)["status"], "Success");
}

#[tokio::test(start_paused = true)]
async fn disconnect_is_noticed_while_stdin_is_blocked() {
    let mut client = Spdy::start("v4.channel.k8s.io", &["sleep"], ALL).await;
    let flood = client
        .client
        .data(client.streams["stdin"], &[0; 1 << 20], false);
    let sent = timeout(Duration::from_secs(1), client.io.write_all(&flood)).await;
    assert!(sent.is_err(), "the process does not read stdin");
    // The server sends keep-alives that need no reply: it would not read the reply.
    let mut output = Vec::new();
    let ping = loop {
        assert_ne!(client.io.read_buf(&mut output).await.unwrap(), 0);
        let received = SpdyTestClient::new().receive(&output);
        if let Some(Received::Ping(id)) = received.last() {
            break *id;
        }
    };
    assert!(ping % 2 == 1 && ping > 0x8000_0001, "{ping}");
    assert_eq!(client.pods.alive.load(Ordering::SeqCst), 1);
    drop(client.io);
    let ended = timeout(Duration::from_secs(60), client.server).await;
    ended.unwrap().unwrap();
    assert_eq!(client.pods.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn spdy_terminal_is_resized() {
    let mut client = Spdy::start("v3.channel.k8s.io", &["size"], TERMINAL).await;
    client
        .send("resize", br#"{"Width":120,"Height":40}"#, false)
        .await;
    let outputs = client.outputs().await;
    assert_eq!(outputs["stdout"], b"120x40");
}

#[tokio::test]
async fn start_failure_is_reported_on_the_error_stream() {
    let outputs = Spdy::start("v4.channel.k8s.io", &["nonsense"], ALL)
        .await
        .outputs()
        .await;
    let message =
        "Internal error occurred: error executing command in container: nonsense: not found";
    assert_eq!(status(&outputs)["message"], message);
    let outputs = Spdy::start("v4.channel.k8s.io", &["broken"], ALL)
        .await
        .outputs()
        .await;
    assert_eq!(status(&outputs)["reason"], "InternalError");
}

#[tokio::test]
async fn large_output_arrives_completely() {
    let size = 3_000_000;
    let client = Spdy::start("v4.channel.k8s.io", &["zeros", &size.to_string()], ALL).await;
    let outputs = client.outputs().await;
    assert_eq!(outputs["stdout"].len(), size);
}

#[tokio::test]
async fn exit_before_end_of_stdin_loses_no_output() {
    let mut client = Spdy::start("v4.channel.k8s.io", &["first-byte"], ALL).await;
    // More than all buffers hold: the server must discard the rest.
    let stdin = client
        .client
        .data(client.streams["stdin"], &vec![b'x'; 2_000_000], false);
    let (mut read, mut write) = tokio::io::split(client.io);
    let sending = tokio::spawn(async move {
        let sent = write.write_all(&stdin).await;
        (write, sent)
    });
    let mut bytes = Vec::new();
    timeout(Duration::from_secs(20), read.read_to_end(&mut bytes))
        .await
        .unwrap()
        .unwrap();
    let (write, sent) = sending.await.unwrap();
    sent.unwrap();
    let received = client.client.receive(&bytes);
    let stream = client.streams["stdout"];
    let bytes = b"x".to_vec();
    assert!(received.contains(&Received::Data { stream, bytes }));
    drop(read.unsplit(write));
    client.server.await.unwrap();
}

#[tokio::test]
async fn disconnect_ends_the_session() {
    let mut client = Spdy::start("v4.channel.k8s.io", &["sleep"], ALL).await;
    client.send("stdin", b"hello", false).await;
    let mut bytes = [0; 1];
    client.io.read_exact(&mut bytes).await.unwrap();
    while client.pods.alive.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(client.io);
    timeout(Duration::from_secs(5), client.server)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(client.pods.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn client_that_opens_no_streams_times_out() {
    let (io, served) = duplex(1024);
    let pods = Arc::new(TestPods::default());
    let checked = checked(RemoteCommandKind::Exec, &["cat"], ALL);
    let version = version(spdy::COMMAND_SPDY_PROTOCOLS, "v4.channel.k8s.io");
    let started = tokio::time::Instant::now();
    let server = serve_spdy(
        served,
        StreamTimeouts::default(),
        ALL,
        version,
        checked,
        pods,
    );
    let server = tokio::spawn(server);
    let mut io = io;
    let mut bytes = Vec::new();
    io.read_to_end(&mut bytes).await.unwrap();
    assert_eq!(
        started.elapsed().as_secs(),
        spdy::STREAM_CREATION_TIMEOUT.as_secs()
    );
    drop(io);
    server.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn idle_session_times_out() {
    let client = Spdy::start("v4.channel.k8s.io", &["sleep"], ALL).await;
    let started = tokio::time::Instant::now();
    client.server.await.unwrap();
    assert_eq!(started.elapsed().as_secs(), 4 * 60 * 60);
    assert_eq!(client.pods.alive.load(Ordering::SeqCst), 0);
}

/// A client over WebSocket.
struct WebSocket {
    io: DuplexStream,
    pods: Arc<TestPods>,
    server: JoinHandle<()>,
}

impl WebSocket {
    fn start(protocol: &str, command: &[&str], requested: RequestedStreams) -> Self {
        Self::start_kind(RemoteCommandKind::Exec, protocol, command, requested)
    }

    fn start_kind(
        kind: RemoteCommandKind,
        protocol: &str,
        command: &[&str],
        requested: RequestedStreams,
    ) -> Self {
        let (io, served) = duplex(16 * 1024);
        let pods = Arc::new(TestPods::default());
        let version = version(super::websocket::COMMAND_WEBSOCKET_PROTOCOLS, protocol);
        let server = tokio::spawn(serve_websocket(
            served,
            StreamTimeouts::default(),
            requested,
            version,
            checked(kind, command, requested),
            Arc::clone(&pods) as _,
        ));
        Self { io, pods, server }
    }

    async fn send(&mut self, first: u8, payload: &[u8]) {
        let frame = websocket::test_frames::client_frame(first, payload);
        self.io.write_all(&frame).await.unwrap();
    }

    /// Reads all frames up to the close frame, which must have the code for a normal closure.
    async fn frames(mut self) -> Vec<(u8, Vec<u8>)> {
        let mut bytes = Vec::new();
        let read = timeout(Duration::from_secs(20), self.io.read_to_end(&mut bytes));
        read.await.unwrap().unwrap();
        let (mut rest, mut frames) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let (first, payload) = websocket::test_frames::server_frame(rest).unwrap();
            let header = match payload.len() {
                0..=125 => 2,
                126..=0xffff => 4,
                _ => 10,
            };
            rest = &rest[header + payload.len()..];
            frames.push((first, payload));
        }
        assert_eq!(frames.pop(), Some((0x88, vec![3, 0xe8])));
        drop(self.io);
        self.server.await.unwrap();
        frames
    }

    async fn channels(self) -> HashMap<u8, Vec<u8>> {
        let mut channels: HashMap<u8, Vec<u8>> = HashMap::new();
        for (first, payload) in self.frames().await {
            if first == 0x82 {
                channels
                    .entry(payload[0])
                    .or_default()
                    .extend(&payload[1..]);
            }
        }
        channels
    }
}

#[tokio::test]
async fn websocket_v5_closes_stdin() {
    let mut client = WebSocket::start("v5.channel.k8s.io", &["cat"], ALL);
    client.send(0x82, b"\x00hello").await;
    client.send(0x89, b"alive?").await;
    client.send(0x82, &[255, 0]).await;
    let frames = client.frames().await;
    assert!(frames.contains(&(0x82, vec![1])), "initial empty message");
    assert!(frames.contains(&(0x8a, b"alive?".to_vec())));
    assert!(frames.contains(&(0x82, b"\x01hello".to_vec())));
    let (first, last) = frames.last().unwrap();
    assert_eq!((*first, last[0]), (0x82, 3));
    let status: Value = serde_json::from_slice(&last[1..]).unwrap();
    assert_eq!(status["status"], "Success");
}

#[tokio::test]
async fn websocket_v4_reports_exit_code_in_both_encodings() {
    let client = WebSocket::start("v4.channel.k8s.io", &["both"], ALL);
    let channels = client.channels().await;
    assert_eq!(channels[&1], b"out");
    assert_eq!(channels[&2], b"err");
    let status: Value = serde_json::from_slice(&channels[&3]).unwrap();
    assert_eq!(status["reason"], "NonZeroExitCode");

    let client = WebSocket::start("v4.base64.channel.k8s.io", &["both"], ALL);
    let frames = client.frames().await;
    assert!(frames.contains(&(0x81, b"1b3V0".to_vec())));
    assert!(frames.contains(&(0x81, b"2ZXJy".to_vec())));
}

#[tokio::test]
async fn unversioned_websocket_reports_text() {
    for protocol in ["channel.k8s.io", ""] {
        let channels = WebSocket::start(protocol, &["exit", "3"], ALL)
            .channels()
            .await;
        let message =
            b"command terminated with non-zero exit code: command terminated with exit code 3";
        assert_eq!(channels[&3], message);
        let channels = WebSocket::start(protocol, &["exit", "0"], ALL)
            .channels()
            .await;
        assert!(!channels.contains_key(&3));
    }
}

#[tokio::test]
async fn websocket_terminal_is_resized() {
    let mut client = WebSocket::start("v5.channel.k8s.io", &["size"], TERMINAL);
    client.send(0x82, b"\x04{\"Width\":80,\"Height\":24}").await;
    assert_eq!(client.channels().await[&1], b"80x24");
}

#[tokio::test]
async fn attach_reports_success() {
    let mut client =
        WebSocket::start_kind(RemoteCommandKind::Attach, "v5.channel.k8s.io", &[], ALL);
    client.send(0x82, b"\x00hello").await;
    client.send(0x82, &[255, 0]).await;
    let channels = client.channels().await;
    assert_eq!(channels[&1], b"hello");
    let status: Value = serde_json::from_slice(&channels[&3]).unwrap();
    assert_eq!(status["status"], "Success");
}

/// kubectl disconnects if its pings are not answered for a minute. The server cannot answer them while it does not read.
#[tokio::test(start_paused = true)]
async fn keep_alives_are_sent_while_stdin_is_blocked() {
    let client = WebSocket::start("v5.channel.k8s.io", &["sleep"], ALL);
    let mut message = vec![0];
    message.resize(10_000_000, b'x');
    let frame = websocket::test_frames::client_frame(0x82, &message);
    let (mut read, mut write) = tokio::io::split(client.io);
    let sending = tokio::spawn(async move { write.write_all(&frame).await });
    let mut initial_message = [0; 3];
    read.read_exact(&mut initial_message).await.unwrap();
    let mut pong = [0; 2];
    read.read_exact(&mut pong).await.unwrap();
    assert_eq!(pong, [0x8a, 0]);
    sending.abort();
    client.server.abort();
}

#[tokio::test]
async fn close_frame_is_answered_and_ends_the_session() {
    let mut client = WebSocket::start("v5.channel.k8s.io", &["sleep"], ALL);
    client.send(0x88, &[3, 0xe8]).await;
    let pods = Arc::clone(&client.pods);
    let frames = client.frames().await;
    assert!(frames.len() <= 1, "{frames:?}");
    assert_eq!(pods.alive.load(Ordering::SeqCst), 0);
}
