//! `hostPort`: connections and datagrams to a port of the machine are carried to a port of the pod.
//!
//! A sandbox is in the machine's own network, and has sockets made in the pod's: it needs nobody else for this, and it goes on
//! without its kubelet. Whoever reaches the machine reaches the port; the pod asked for that. TCP, and UDP
//! (`host_datagrams.rs`); a port of SCTP is closed, and the pod is told so by an Event.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerPort, PodSpec};
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::{AbortHandle, JoinSet};

use super::exec::connect;
use super::host_datagrams;
use super::inside::Inside;

/// So many connections to a port are carried at once; more wait for their turn.
const CONNECTIONS: usize = 512;
/// A client that is silent for so long is asked whether it is still there: one that lost its power would hold its place for ever.
const SILENCE: Duration = Duration::from_secs(60);
/// Between such questions, of which the kernel asks a few.
const ASK_EVERY: Duration = Duration::from_secs(10);
/// After a connection could not be accepted, for want of descriptors mostly.
const PAUSE: Duration = Duration::from_millis(100);

/// The ports of a pod that the machine listens at, until this is dropped.
#[derive(Debug, Default)]
pub struct HostPorts(Vec<AbortHandle>);

impl Drop for HostPorts {
    fn drop(&mut self) {
        for listening in &self.0 {
            listening.abort();
        }
    }
}

impl HostPorts {
    /// Listens at all of them, or at none and says which is not to be had. `pod` is the pod's address.
    pub async fn open(spec: &PodSpec, pod: IpAddr, inside: &Rc<Inside>) -> Result<Self, String> {
        let mut listeners = Vec::new();
        for wanted in wanted(spec) {
            let to = SocketAddr::new(pod, wanted.to);
            let listener = Listener::open(&wanted).await;
            let listener = listener.map_err(|error| refusal(wanted.from, &error))?;
            listeners.push((listener, to));
        }
        let serve = |(listener, to)| {
            let inside = inside.clone();
            let serving = match listener {
                Listener::Streams(listener) => {
                    tokio::task::spawn_local(serve(listener, to, inside))
                }
                Listener::Datagrams(socket) => {
                    tokio::task::spawn_local(host_datagrams::serve(socket, to, inside))
                }
            };
            serving.abort_handle()
        };
        Ok(Self(listeners.into_iter().map(serve).collect()))
    }
}

enum Listener {
    Streams(TcpListener),
    Datagrams(UdpSocket),
}

impl Listener {
    async fn open(wanted: &Wanted) -> std::io::Result<Self> {
        if wanted.datagrams {
            UdpSocket::bind(wanted.from).await.map(Self::Datagrams)
        } else {
            TcpListener::bind(wanted.from).await.map(Self::Streams)
        }
    }
}

/// A port to listen at.
struct Wanted {
    from: SocketAddr,
    /// The port of the pod that it stands for.
    to: u16,
    datagrams: bool,
}

/// All that are to be listened at.
fn wanted(spec: &PodSpec) -> Vec<Wanted> {
    published(spec)
        .filter(|port| matches!(protocol(port), "TCP" | "UDP"))
        .filter_map(|port| {
            let address = port.host_ip.as_deref().and_then(|ip| ip.parse().ok());
            let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
            Some(Wanted {
                from: SocketAddr::new(address, number(port.host_port?)?),
                to: number(port.container_port)?,
                datagrams: protocol(port) == "UDP",
            })
        })
        .collect()
}

/// What is said of those that nobody listens at, though the pod asks for them: it runs, as elsewhere, but not in silence.
pub(super) fn closed(spec: &PodSpec) -> Vec<String> {
    let words = |port: &ContainerPort| {
        let protocol = protocol(port);
        let number = number(port.host_port?)?;
        (!matches!(protocol, "TCP" | "UDP")).then(|| {
            format!("host port {number}/{protocol}: nobody listens there, for {protocol} is not carried to pods; TCP and UDP are")
        })
    };
    published(spec).filter_map(words).collect()
}

/// Ports of containers that stay. With the machine's own network they are the machine's already.
fn published(spec: &PodSpec) -> impl Iterator<Item = &ContainerPort> {
    let is_sidecar = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let own_network = spec.host_network != Some(true);
    let sidecars = spec.init_containers.iter().flatten().filter(is_sidecar);
    sidecars
        .chain(&spec.containers)
        .filter(move |_| own_network)
        .flat_map(|container| container.ports.iter().flatten())
}

fn protocol(port: &ContainerPort) -> &str {
    port.protocol.as_deref().unwrap_or("TCP")
}

fn number(port: i32) -> Option<u16> {
    u16::try_from(port).ok().filter(|port| *port > 0)
}

fn refusal(at: SocketAddr, error: &std::io::Error) -> String {
    let port = at.port();
    let why = match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "something else on this node listens there, perhaps another user's; it is tried again"
                .to_owned()
        }
        std::io::ErrorKind::PermissionDenied => {
            "ports below 1024 are root's on this node; choose a higher one".to_owned()
        }
        _ => format!("cannot listen at {at}: {error}"),
    };
    format!("host port {port}: {why}")
}

async fn serve(listener: TcpListener, to: SocketAddr, inside: Rc<Inside>) {
    let mut carried = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = carried.join_next() => {}
            accepted = listener.accept(), if carried.len() < CONNECTIONS => match accepted {
                Ok((client, _)) => {
                    carried.spawn_local(carry(client, to, inside.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, port = to.port(), "cannot accept a connection to a host port");
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

/// Carries bytes both ways; if the pod doesn't listen, the connection is closed.
async fn carry(mut client: TcpStream, to: SocketAddr, inside: Rc<Inside>) {
    let carried = async {
        let mut server = connect(&inside, to).await?;
        // Small answers must not wait for more; whoever speaks here has put them together already.
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        notice_silence(&client)?;
        tokio::io::copy_bidirectional(&mut client, &mut server).await
    };
    if let Err(error) = carried.await {
        tracing::trace!(%error, %to, "a connection to a host port was cut");
    }
}

fn notice_silence(client: &TcpStream) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(client, true)?;
    sockopt::set_tcp_keepidle(client, SILENCE)?;
    sockopt::set_tcp_keepintvl(client, ASK_EVERY)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(spec: serde_json::Value) -> Vec<String> {
        let spec = serde_json::from_value(spec).unwrap();
        let words = |wanted: Wanted| {
            let kind = if wanted.datagrams { " datagrams" } else { "" };
            format!("{} {}{kind}", wanted.from, wanted.to)
        };
        wanted(&spec).into_iter().map(words).collect()
    }

    #[test]
    fn only_ports_of_what_stays_are_published() {
        let port = |host: u16, pod: u16| json!([{"hostPort": host, "containerPort": pod}]);
        let spec = json!({
            "initContainers": [
                {"name": "i", "ports": port(1001, 1)},
                {"name": "s", "restartPolicy": "Always", "ports": port(1002, 2)}],
            "containers": [
                {"name": "a", "ports": [{"containerPort": 3}, {"containerPort": 4, "hostPort": 1004, "hostIP": "127.0.0.1"}]},
                {"name": "b", "ports": [{"containerPort": 5, "hostPort": 1005, "protocol": "UDP"},
                    {"containerPort": 6, "hostPort": 0}, {"containerPort": 7, "hostPort": 1007, "hostIP": "::1"},
                    {"containerPort": 8, "hostPort": 1008, "protocol": "SCTP"}, {"containerPort": 9, "protocol": "SCTP"}]}],
        });
        let told = |spec: &serde_json::Value| {
            closed(&serde_json::from_value(spec.clone()).unwrap()).join("\n")
        };
        let words = told(&spec);
        assert!(
            words.starts_with("host port 1008/SCTP: nobody") && words.lines().count() == 1,
            "{words}"
        );
        assert_eq!(
            of(spec.clone()),
            [
                "0.0.0.0:1002 2",
                "127.0.0.1:1004 4",
                "0.0.0.0:1005 5 datagrams",
                "[::1]:1007 7"
            ]
        );
        let mut on_host = spec;
        on_host["hostNetwork"] = json!(true);
        assert_eq!(told(&on_host), "");
        assert!(of(on_host).is_empty());
    }

    #[test]
    fn refusals_say_what_to_do() {
        let at = "0.0.0.0:80".parse().unwrap();
        let said = |kind: std::io::ErrorKind| refusal(at, &kind.into());
        assert!(said(std::io::ErrorKind::AddrInUse).starts_with("host port 80: something else"));
        assert!(said(std::io::ErrorKind::PermissionDenied).contains("higher"));
        assert!(said(std::io::ErrorKind::AddrNotAvailable).contains("0.0.0.0:80"));
    }

    #[tokio::test]
    async fn clients_that_are_gone_are_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let client = TcpStream::connect(to).await.unwrap();
        assert!(!sockopt::socket_keepalive(&client).unwrap());
        notice_silence(&client).unwrap();
        assert!(sockopt::socket_keepalive(&client).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&client).unwrap(), SILENCE);
    }
}
