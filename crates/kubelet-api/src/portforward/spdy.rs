//! Port-forward over SPDY, raw or in a WebSocket: one connection carries any number of forwarded connections.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::TargetPod;
use super::pairs::{PairOutcome, StreamLabel, StreamPairs, StreamType};
use super::relay::{copy_to_client, copy_to_pod};
use crate::pod_source::PodSource;
use crate::streams::{
    CommandSender, ConnectionClosed, IncomingStream, OpenedStream, OutgoingStream,
};

/// How long a stream waits for its counterpart.
const PAIR_TIMEOUT: Duration = Duration::from_secs(30);

struct Stream {
    incoming: IncomingStream,
    outgoing: OutgoingStream,
}

/// Forwards until the connection ends.
pub(super) async fn run(
    mut opened: mpsc::Receiver<OpenedStream>,
    commands: CommandSender,
    pod: TargetPod,
    pods: Arc<dyn PodSource>,
) {
    let mut pairs = StreamPairs::new();
    let mut forwarding = JoinSet::new();
    // Deadlines of incomplete requests. All have the same time-out, so the queue is sorted.
    let mut deadlines: VecDeque<(Instant, String)> = VecDeque::new();
    loop {
        let next = deadlines.front().map(|(deadline, _)| *deadline);
        let expired = async {
            match next {
                Some(deadline) => sleep_until(deadline).await,
                None => pending().await,
            }
        };
        tokio::select! {
            new = opened.recv() => {
                let Some(new) = new else { return };
                let outgoing = commands.outgoing(new.stream);
                let Some(label) = StreamLabel::read(new.stream, &new.headers) else {
                    tracing::debug!(headers = ?new.headers, "client opened stream without valid port-forward headers");
                    let _ = outgoing.reset().await;
                    continue;
                };
                if outgoing.accept().await.is_err() {
                    return;
                }
                let request = label.request.clone();
                let stream = Stream { incoming: new.incoming, outgoing };
                match pairs.add(label, stream) {
                    PairOutcome::Waiting => {
                        deadlines.push_back((Instant::now() + PAIR_TIMEOUT, request));
                    }
                    PairOutcome::Duplicate(stream) => {
                        let _ = stream.outgoing.reset().await;
                    }
                    PairOutcome::Pair { port, data, error } => {
                        forwarding.spawn(forward(pod.clone(), Arc::clone(&pods), port, data, error));
                    }
                }
            }
            () = expired => {
                if let Some((_, request)) = deadlines.pop_front()
                    && let Some((stream_type, stream)) = pairs.expire(&request)
                {
                    expire(stream_type, &stream, &request).await;
                }
            }
            // Reap finished tasks.
            Some(_) = forwarding.join_next() => {}
        }
    }
}

async fn expire(stream_type: StreamType, stream: &Stream, request: &str) {
    if stream_type == StreamType::Error {
        let message = format!("(request={request}) timed out waiting for streams");
        let _ = report(&stream.outgoing, message).await;
    }
    let _ = stream.outgoing.reset().await;
}

/// Serves one forwarded connection.
async fn forward(
    pod: TargetPod,
    pods: Arc<dyn PodSource>,
    port: u16,
    mut data: Stream,
    error: Stream,
) {
    // Errors mean that the client has disconnected, which ends everything.
    let _ = match connect(&pod, &*pods, port, &mut data, &error.outgoing).await {
        Ok(()) => Ok(()),
        Err(message) => {
            tracing::debug!(port, pod = pod.name, error = message, "forwarding failed");
            let _ = report(&error.outgoing, pod.error_message(port, &message)).await;
            data.outgoing.reset().await
        }
    };
}

async fn connect(
    pod: &TargetPod,
    pods: &dyn PodSource,
    port: u16,
    data: &mut Stream,
    error: &OutgoingStream,
) -> Result<(), String> {
    let connected = pods.port_forward(&pod.uid, port).await;
    let connection = connected.map_err(|error| error.message)?;
    let outgoing = &data.outgoing;
    let pod_to_client = async {
        copy_to_client(connection.from_pod, outgoing)
            .await
            .map_err(|error| error.to_string())?;
        let _ = outgoing.finish().await;
        // kubectl closes its end only after the error stream has ended.
        let _ = error.finish().await;
        Ok(())
    };
    let client_to_pod = async {
        copy_to_pod(&mut data.incoming, connection.to_pod).await;
        Ok::<(), String>(())
    };
    tokio::try_join!(pod_to_client, client_to_pod).map(|_| ())
}

async fn report(error: &OutgoingStream, message: String) -> Result<(), ConnectionClosed> {
    error.send(Bytes::from(message)).await?;
    error.finish().await
}
