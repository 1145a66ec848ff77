//! `hostPort` with UDP: forwards datagrams from a port of the node to a port of the pod, and replies back.
//!
//! Each client address gets a socket in the pod's network, which is closed after a while without traffic. Datagrams that exceed a
//! limit are dropped.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::inner_client::InnerClient;

/// Clients that have a socket at once; datagrams of others are dropped.
const MAX_CLIENTS: usize = 512;
/// Datagrams per client that wait to be sent; more are dropped.
const MAX_QUEUED: usize = 64;
/// A client's socket is closed after this long without traffic.
const UDP_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after recvfrom() failed.
const RECEIVE_RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_DATAGRAM: usize = 65_535;

/// Forwards all datagrams that `socket` receives.
pub(super) async fn serve(socket: UdpSocket, to: SocketAddr, inner: Rc<InnerClient>) {
    let socket = Rc::new(socket);
    let mut clients: HashMap<SocketAddr, mpsc::Sender<Vec<u8>>> = HashMap::new();
    let mut relays = JoinSet::new();
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        tokio::select! {
            Some(_) = relays.join_next() => clients.retain(|_, queue| !queue.is_closed()),
            received = socket.recv_from(&mut buffer) => match received {
                Ok((length, client)) => {
                    let is_open = clients.get(&client).is_some_and(|queue| !queue.is_closed());
                    if !is_open && clients.len() < MAX_CLIENTS {
                        let (queue, datagrams) = mpsc::channel(MAX_QUEUED);
                        clients.insert(client, queue);
                        let client = (socket.clone(), client);
                        relays.spawn_local(relay_or_log(client, datagrams, to, inner.clone()));
                    }
                    if let Some(queue) = clients.get(&client) {
                        let _ = queue.try_send(buffer[..length].to_vec());
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, port = to.port(), "cannot receive from a host port");
                    tokio::time::sleep(RECEIVE_RETRY_DELAY).await;
                }
            },
        }
    }
}

async fn relay_or_log(
    client: (Rc<UdpSocket>, SocketAddr),
    datagrams: mpsc::Receiver<Vec<u8>>,
    to: SocketAddr,
    inner: Rc<InnerClient>,
) {
    if let Err(error) = relay(client, datagrams, to, &inner).await {
        tracing::trace!(%error, %to, "cannot forward datagrams of a host port");
    }
}

/// Forwards datagrams of one client, and replies to it, until both are idle or the pod's port is closed.
async fn relay(
    (socket, client): (Rc<UdpSocket>, SocketAddr),
    mut datagrams: mpsc::Receiver<Vec<u8>>,
    to: SocketAddr,
    inner: &InnerClient,
) -> std::io::Result<()> {
    let pod = connect(inner, to).await?;
    let mut reply = vec![0; MAX_DATAGRAM];
    loop {
        tokio::select! {
            datagram = datagrams.recv() => match datagram {
                Some(datagram) => pod.send(&datagram).await.map(drop)?,
                None => return Ok(()),
            },
            length = pod.recv(&mut reply) => {
                socket.send_to(&reply[..length?], client).await?;
            }
            () = tokio::time::sleep(UDP_IDLE_TIMEOUT) => return Ok(()),
        }
    }
}

/// Creates a socket in the pod's network that is connected to `to`.
async fn connect(inner: &InnerClient, to: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = super::exec::create_socket(inner, to, true).await?;
    let socket = UdpSocket::from_std(socket.into())?;
    socket.connect(to).await?;
    Ok(socket)
}
