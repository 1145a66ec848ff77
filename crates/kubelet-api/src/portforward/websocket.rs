//! Port-forward over WebSocket channels: two for each port that the query names, one connection for each port.

use std::future::pending;

use bytes::Bytes;
use futures::future::join_all;

use super::TargetPod;
use super::relay::{to_client, to_pod};
use crate::pod_source::PodSource;
use crate::streams::{CommandSender, IncomingStream, OutgoingStream, StreamDriver};
use crate::websocket::{Channels, Encoding};

/// A client that names no protocol speaks the newest one in binary.
pub(super) const PROTOCOLS: &[(&str, Encoding)] = &[
    ("v4.channel.k8s.io", Encoding::Binary),
    ("v4.base64.channel.k8s.io", Encoding::Base64),
    ("", Encoding::Binary),
];

/// The channels of a port.
pub(super) struct PortChannels {
    port: u16,
    incoming: IncomingStream,
    data: OutgoingStream,
    error: OutgoingStream,
}

pub(super) fn channels(
    driver: &mut StreamDriver<Channels>,
    commands: &CommandSender,
    ports: &[u16],
) -> Vec<PortChannels> {
    let numbered = ports.iter().zip((0..).step_by(2));
    numbered
        .map(|(port, first)| PortChannels {
            port: *port,
            incoming: driver.expect(first),
            data: commands.outgoing(first),
            error: commands.outgoing(first + 1),
        })
        .collect()
}

/// Forwards until all pods' ends are closed, or the client is gone.
pub(super) async fn run(channels: Vec<PortChannels>, pod: TargetPod, pods: &dyn PodSource) {
    // Each channel begins with its port, before anything of any other.
    for channel in &channels {
        let port = Bytes::copy_from_slice(&channel.port.to_le_bytes());
        for outgoing in [&channel.data, &channel.error] {
            if outgoing.send(port.clone()).await.is_err() {
                return;
            }
        }
    }
    let pod = &pod;
    join_all(
        channels
            .into_iter()
            .map(|channel| forward(channel, pod, pods)),
    )
    .await;
}

async fn forward(mut channels: PortChannels, pod: &TargetPod, pods: &dyn PodSource) {
    let port = channels.port;
    if let Err(words) = connect(&mut channels, pod, pods).await {
        tracing::debug!(port, pod = pod.name, error = words, "forwarding failed");
        let words = pod.failure(port, &words);
        let _ = channels.error.send(Bytes::from(words)).await;
    }
}

async fn connect(
    channels: &mut PortChannels,
    pod: &TargetPod,
    pods: &dyn PodSource,
) -> Result<(), String> {
    let connected = pods.port_forward(&pod.uid, channels.port).await;
    let connection = connected.map_err(|error| error.message)?;
    let (read, write) = tokio::io::split(connection);
    let back = async {
        to_pod(&mut channels.incoming, write).await;
        // The client can't say that it is done with one channel, so only the pod's end is an end.
        pending::<()>().await;
    };
    tokio::select! {
        there = to_client(read, &channels.data) => there.map_err(|error| error.to_string()),
        () = back => Ok(()),
    }
}
