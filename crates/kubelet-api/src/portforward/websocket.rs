//! Port-forward over WebSocket channels: two channels and one connection for each port in the query.

use std::future::pending;

use bytes::Bytes;
use futures::future::join_all;

use super::TargetPod;
use super::relay::{copy_to_client, copy_to_pod};
use crate::pod_source::PodSource;
use crate::streams::{CommandSender, IncomingStream, OutgoingStream, StreamDriver};
use crate::websocket::{Channels, Encoding};

/// Supported protocols. A client that names none uses the binary one.
pub(super) const FORWARD_WEBSOCKET_PROTOCOLS: &[(&str, Encoding)] = &[
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
            incoming: driver.register(first),
            data: commands.outgoing(first),
            error: commands.outgoing(first + 1),
        })
        .collect()
}

/// Forwards until the pod has closed all connections, or the client disconnects.
pub(super) async fn run(channels: Vec<PortChannels>, pod: TargetPod, pods: &dyn PodSource) {
    // Upstream sends the port on every channel before any data.
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
    if let Err(message) = connect(&mut channels, pod, pods).await {
        tracing::debug!(port, pod = pod.name, error = message, "forwarding failed");
        let message = pod.error_message(port, &message);
        let _ = channels.error.send(Bytes::from(message)).await;
    }
}

async fn connect(
    channels: &mut PortChannels,
    pod: &TargetPod,
    pods: &dyn PodSource,
) -> Result<(), String> {
    let connected = pods.port_forward(&pod.uid, channels.port).await;
    let connection = connected.map_err(|error| error.message)?;
    let client_to_pod = async {
        copy_to_pod(&mut channels.incoming, connection.to_pod).await;
        // The protocol has no way for the client to close one channel, so only the pod ends the connection.
        pending::<()>().await;
    };
    tokio::select! {
        result = copy_to_client(connection.from_pod, &channels.data) => result.map_err(|error| error.to_string()),
        () = client_to_pod => Ok(()),
    }
}
