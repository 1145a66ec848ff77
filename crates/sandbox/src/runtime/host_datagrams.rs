//! `hostPort` of UDP: datagrams to a port of the machine are carried to a port of the pod, and its answers back.
//!
//! There are no connections that would begin and end: whoever sends is given a socket in the pod's network, and loses it when
//! neither side has said anything for a while. What there is no room for is lost, as datagrams may be.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::inside::Inside;

/// So many senders have a socket at once.
const SENDERS: usize = 512;
/// So many datagrams of a sender wait to be carried.
const WAITING: usize = 64;
/// A sender and a pod that are silent for so long have nothing to say.
const SILENCE: Duration = Duration::from_secs(60);
/// After a datagram could not be received.
const PAUSE: Duration = Duration::from_millis(100);
/// No datagram is larger.
const LARGEST: usize = 65_535;

/// Carries all that comes to `socket`, for ever.
pub(super) async fn serve(socket: UdpSocket, to: SocketAddr, inside: Rc<Inside>) {
    let socket = Rc::new(socket);
    let mut known: HashMap<SocketAddr, mpsc::Sender<Vec<u8>>> = HashMap::new();
    let mut carried = JoinSet::new();
    let mut buffer = vec![0; LARGEST];
    loop {
        tokio::select! {
            Some(_) = carried.join_next() => known.retain(|_, queue| !queue.is_closed()),
            received = socket.recv_from(&mut buffer) => match received {
                Ok((length, sender)) => {
                    let is_known = known.get(&sender).is_some_and(|queue| !queue.is_closed());
                    if !is_known && known.len() < SENDERS {
                        let (queue, datagrams) = mpsc::channel(WAITING);
                        known.insert(sender, queue);
                        let client = (socket.clone(), sender);
                        carried.spawn_local(carry(client, datagrams, to, inside.clone()));
                    }
                    if let Some(queue) = known.get(&sender) {
                        let _ = queue.try_send(buffer[..length].to_vec());
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, port = to.port(), "cannot receive from a host port");
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

/// Carries datagrams of one sender, and answers to it, until both are silent or the pod doesn't listen.
async fn carry(
    client: (Rc<UdpSocket>, SocketAddr),
    datagrams: mpsc::Receiver<Vec<u8>>,
    to: SocketAddr,
    inside: Rc<Inside>,
) {
    if let Err(error) = relay(client, datagrams, to, &inside).await {
        tracing::trace!(%error, %to, "datagrams to a host port are not carried further");
    }
}

async fn relay(
    (socket, sender): (Rc<UdpSocket>, SocketAddr),
    mut datagrams: mpsc::Receiver<Vec<u8>>,
    to: SocketAddr,
    inside: &Inside,
) -> std::io::Result<()> {
    let pod = connect(inside, to).await?;
    let mut answer = vec![0; LARGEST];
    loop {
        tokio::select! {
            datagram = datagrams.recv() => match datagram {
                Some(datagram) => pod.send(&datagram).await.map(drop)?,
                None => return Ok(()),
            },
            length = pod.recv(&mut answer) => {
                socket.send_to(&answer[..length?], sender).await?;
            }
            () = tokio::time::sleep(SILENCE) => return Ok(()),
        }
    }
}

/// A socket of the pod's network that speaks with `to` only.
async fn connect(inside: &Inside, to: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = super::exec::socket(inside, to, true).await?;
    let socket = UdpSocket::from_std(socket.into())?;
    socket.connect(to).await?;
    Ok(socket)
}
