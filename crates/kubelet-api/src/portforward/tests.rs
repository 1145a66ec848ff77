//! Port-forward with streams as kubectl opens them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::spdy::test_client::{Received, SpdyTestClient};
use crate::testing::TestPods;
use crate::websocket::test_frames::{client_frame, server_frame};

fn pod() -> TargetPod {
    TargetPod {
        name: "p".to_owned(),
        uid: "1234".to_owned(),
    }
}

struct Forwarder {
    io: DuplexStream,
    client: SpdyTestClient,
    received: Vec<Received>,
    pods: Arc<TestPods>,
    server: JoinHandle<()>,
}

impl Forwarder {
    fn start() -> Self {
        let (io, served) = duplex(16 * 1024);
        let pods = Arc::new(TestPods::default());
        let timeouts = StreamTimeouts::default();
        let server = serve_spdy(
            served,
            SpdyConnection::new(),
            timeouts,
            pod(),
            Arc::clone(&pods) as _,
        );
        Self {
            io,
            client: SpdyTestClient::new(),
            received: Vec::new(),
            pods,
            server: tokio::spawn(server),
        }
    }

    /// Opens the streams of a connection as kubectl does: the error stream, whose client side it closes at once, and the data stream.
    async fn connect(&mut self, port: &str, request: &str) -> (u32, u32) {
        let with = |kind| [("streamtype", kind), ("port", port), ("requestid", request)];
        let (error, bytes) = self.client.open(&with("error"));
        self.io.write_all(&bytes).await.unwrap();
        let end = self.client.data(error, b"", true);
        self.io.write_all(&end).await.unwrap();
        let (data, bytes) = self.client.open(&with("data"));
        self.io.write_all(&bytes).await.unwrap();
        (data, error)
    }

    async fn send(&mut self, stream: u32, bytes: &[u8], fin: bool) {
        let bytes = self.client.data(stream, bytes, fin);
        self.io.write_all(&bytes).await.unwrap();
    }

    async fn until(&mut self, condition: impl Fn(&[Received]) -> bool) {
        let mut buffer = [0; 4096];
        while !condition(&self.received) {
            let read = timeout(Duration::from_secs(60), self.io.read(&mut buffer));
            let count = read.await.unwrap().unwrap();
            assert_ne!(count, 0, "the connection ended: {:?}", self.received);
            self.received.extend(self.client.receive(&buffer[..count]));
        }
    }

    fn data(&self, id: u32) -> Vec<u8> {
        let bytes = self.received.iter().map(|received| match received {
            Received::Data { stream, bytes } if *stream == id => &bytes[..],
            _ => &[],
        });
        bytes.collect::<Vec<_>>().concat()
    }
}

#[tokio::test]
async fn bytes_are_forwarded_both_ways_until_closed() {
    let mut forwarder = Forwarder::start();
    let (data, error) = forwarder.connect("7", "0").await;
    forwarder.send(data, b"hello", false).await;
    forwarder.send(data, b" world", true).await;
    let ended = |received: &[Received]| {
        received.contains(&Received::Finished(data))
            && received.contains(&Received::Finished(error))
    };
    forwarder.until(ended).await;
    assert_eq!(forwarder.data(data), b"hello world");
    assert_eq!(forwarder.data(error), b"");
}

#[tokio::test]
async fn close_by_the_pod_reaches_the_client() {
    let mut forwarder = Forwarder::start();
    let (data, error) = forwarder.connect("80", "0").await;
    forwarder
        .until(|received| received.contains(&Received::Finished(error)))
        .await;
    assert!(forwarder.received.contains(&Received::Finished(data)));
    assert_eq!(forwarder.data(data), b"hello");
    let reset = forwarder.client.reset(data);
    forwarder.io.write_all(&reset).await.unwrap();
}

#[tokio::test]
async fn refused_connection_does_not_affect_others() {
    let mut forwarder = Forwarder::start();
    let (data, error) = forwarder.connect("9", "0").await;
    forwarder
        .until(|received| received.contains(&Received::Reset(data)))
        .await;
    forwarder
        .until(|received| received.contains(&Received::Finished(error)))
        .await;
    let message = b"error forwarding port 9 to pod p, uid 1234: connection refused";
    assert_eq!(forwarder.data(error), message);
    let (data, _) = forwarder.connect("80", "1").await;
    forwarder
        .until(|received| received.contains(&Received::Finished(data)))
        .await;
    assert_eq!(forwarder.data(data), b"hello");
}

#[tokio::test]
async fn many_connections_share_one_client_connection() {
    let mut forwarder = Forwarder::start();
    let mut streams = Vec::new();
    for request in 0..100 {
        streams.push(forwarder.connect("7", &request.to_string()).await.0);
    }
    for stream in &streams {
        forwarder
            .send(*stream, stream.to_string().as_bytes(), true)
            .await;
    }
    let ended = |received: &[Received]| {
        let is_over = |stream: &u32| received.contains(&Received::Finished(*stream));
        streams.iter().all(is_over)
    };
    forwarder.until(ended).await;
    for stream in &streams {
        assert_eq!(forwarder.data(*stream), stream.to_string().as_bytes());
    }
}

#[tokio::test]
async fn disconnect_ends_all_connections() {
    let mut forwarder = Forwarder::start();
    forwarder.connect("1", "0").await;
    forwarder.connect("7", "1").await;
    while forwarder.pods.alive.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(forwarder.io);
    timeout(Duration::from_secs(5), forwarder.server)
        .await
        .unwrap()
        .unwrap();
    while forwarder.pods.alive.load(Ordering::SeqCst) > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn incomplete_stream_pair_times_out() {
    let mut forwarder = Forwarder::start();
    let headers = [("streamtype", "error"), ("port", "7"), ("requestid", "0")];
    let (error, bytes) = forwarder.client.open(&headers);
    forwarder.io.write_all(&bytes).await.unwrap();
    forwarder
        .until(|received| received.contains(&Received::Finished(error)))
        .await;
    assert_eq!(
        forwarder.data(error),
        b"(request=0) timed out waiting for streams"
    );
}

#[tokio::test]
async fn streams_without_valid_headers_are_reset() {
    let mut forwarder = Forwarder::start();
    let (stream, bytes) = forwarder.client.open(&[("streamtype", "data")]);
    forwarder.io.write_all(&bytes).await.unwrap();
    forwarder
        .until(|received| received.contains(&Received::Reset(stream)))
        .await;
}

#[tokio::test]
async fn channels_start_with_their_port_number() {
    let (mut io, served) = duplex(16 * 1024);
    let pods = Arc::new(TestPods::default());
    let (timeouts, ports) = (StreamTimeouts::default(), vec![80, 9]);
    let server = serve_channels(served, Encoding::Binary, timeouts, ports, pod(), pods);
    let server = tokio::spawn(server);
    let mut bytes = Vec::new();
    timeout(Duration::from_secs(20), io.read_to_end(&mut bytes))
        .await
        .unwrap()
        .unwrap();
    let (mut rest, mut messages) = (&bytes[..], Vec::new());
    while let Some((_, payload)) = server_frame(rest) {
        rest = &rest[2 + payload.len()..];
        messages.push(payload);
    }
    assert_eq!(
        messages[..4],
        [[0, 80, 0], [1, 80, 0], [2, 9, 0], [3, 9, 0]]
    );
    assert!(messages.contains(&b"\x00hello".to_vec()));
    let message = b"\x03error forwarding port 9 to pod p, uid 1234: connection refused";
    assert!(messages.contains(&message.to_vec()));
    io.write_all(&client_frame(0x88, &[3, 0xe8])).await.unwrap();
    drop(io);
    server.await.unwrap();
}
