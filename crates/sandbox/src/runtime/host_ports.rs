//! `hostPort`: forwards TCP connections and UDP datagrams (`host_port_udp.rs`) from a port of the node to a port of the pod.
//!
//! The sandbox is in the node's network namespace, and the inner process creates sockets in the pod's. So forwarding needs neither
//! the kubelet nor the hub. Every client that can reach the node can connect to the port, as usual for `hostPort`.
//! SCTP is not supported; the sandbox reports such ports in an Event.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerPort, PodSpec};
use pod_protocol::restart::is_sidecar;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::{AbortHandle, JoinSet};

use super::exec::connect;
use super::host_port_udp;
use super::inner_client::InnerClient;

/// Concurrent connections per port; more wait in the listener's backlog.
const MAX_CONNECTIONS: usize = 512;
/// TCP keepalive for clients: without it, the connection of a client that lost power would stay open forever.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after accept() failed, usually because the process has too many open files.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The open host ports of a pod. Dropping it closes them.
#[derive(Debug, Default)]
pub struct HostPorts(Vec<AbortHandle>);

impl Drop for HostPorts {
    fn drop(&mut self) {
        for server in &self.0 {
            server.abort();
        }
    }
}

impl HostPorts {
    /// Opens all host ports of the spec, or none: an error names the port that cannot be opened. `pod` is the pod's address.
    pub async fn open(
        spec: &PodSpec,
        pod: IpAddr,
        inner: &Rc<InnerClient>,
    ) -> Result<Self, String> {
        let mut listeners = Vec::new();
        for port in supported(spec) {
            let to = SocketAddr::new(pod, port.pod_port);
            let listener = Listener::open(&port).await;
            let listener = listener.map_err(|error| listen_error(port.listen, &error))?;
            listeners.push((listener, to));
        }
        let serve = |(listener, to)| {
            let inner = inner.clone();
            let server = match listener {
                Listener::Tcp(listener) => tokio::task::spawn_local(serve(listener, to, inner)),
                Listener::Udp(socket) => {
                    tokio::task::spawn_local(host_port_udp::serve(socket, to, inner))
                }
            };
            server.abort_handle()
        };
        Ok(Self(listeners.into_iter().map(serve).collect()))
    }
}

enum Listener {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Listener {
    async fn open(port: &HostPort) -> std::io::Result<Self> {
        match port.protocol {
            HostPortProtocol::Tcp => TcpListener::bind(port.listen).await.map(Self::Tcp),
            HostPortProtocol::Udp => UdpSocket::bind(port.listen).await.map(Self::Udp),
        }
    }
}

/// A host port to open.
struct HostPort {
    /// The address on the node.
    listen: SocketAddr,
    pod_port: u16,
    protocol: HostPortProtocol,
}

/// The protocols that are forwarded to pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostPortProtocol {
    Tcp,
    Udp,
}

impl HostPortProtocol {
    /// Returns `None` for a protocol that is not supported.
    fn of(port: &ContainerPort) -> Option<Self> {
        match protocol(port) {
            "TCP" => Some(Self::Tcp),
            "UDP" => Some(Self::Udp),
            _ => None,
        }
    }
}

/// The host ports of the spec with a supported protocol.
fn supported(spec: &PodSpec) -> Vec<HostPort> {
    published(spec)
        .filter_map(|port| {
            let protocol = HostPortProtocol::of(port)?;
            let address = port.host_ip.as_deref().and_then(|ip| ip.parse().ok());
            let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
            Some(HostPort {
                listen: SocketAddr::new(address, number(port.host_port?)?),
                pod_port: number(port.container_port)?,
                protocol,
            })
        })
        .collect()
}

/// Messages about the host ports of the spec with an unsupported protocol. As with other runtimes, the pod runs without them.
pub(super) fn unsupported(spec: &PodSpec) -> Vec<String> {
    let message = |port: &ContainerPort| {
        let number = number(port.host_port?)?;
        HostPortProtocol::of(port).is_none().then(|| {
            format!(
                "host port {number}/{} is closed: only TCP and UDP are forwarded to pods",
                protocol(port)
            )
        })
    };
    published(spec).filter_map(message).collect()
}

/// Ports of containers and sidecars. With `hostNetwork` there is nothing to forward.
fn published(spec: &PodSpec) -> impl Iterator<Item = &ContainerPort> {
    let own_network = spec.host_network != Some(true);
    let init = spec.init_containers.iter().flatten();
    let sidecars = init.filter(|container| is_sidecar(container));
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

fn listen_error(at: SocketAddr, error: &std::io::Error) -> String {
    let port = at.port();
    let why = match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "already in use on this node, perhaps by another user (hint: choose another port, or wait: the pod is retried)"
                .to_owned()
        }
        std::io::ErrorKind::PermissionDenied => {
            "ports below 1024 are reserved for root on this node (hint: choose a higher port)"
                .to_owned()
        }
        _ => format!("cannot listen on {at}: {error}"),
    };
    format!("host port {port}: {why}")
}

async fn serve(listener: TcpListener, to: SocketAddr, inner: Rc<InnerClient>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((client, _)) => {
                    connections.spawn_local(forward(client, to, inner.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, port = to.port(), "cannot accept a connection to a host port");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            },
        }
    }
}

/// Forwards bytes in both directions. Closes the client's connection if the pod does not accept one.
async fn forward(mut client: TcpStream, to: SocketAddr, inner: Rc<InnerClient>) {
    let forwarded = async {
        let mut server = connect(&inner, to).await?;
        // Client and pod have already batched their writes; Nagle's algorithm would only add latency.
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        set_keepalive(&client)?;
        tokio::io::copy_bidirectional(&mut client, &mut server).await
    };
    if let Err(error) = forwarded.await {
        tracing::trace!(%error, %to, "connection to a host port failed");
    }
}

fn set_keepalive(client: &TcpStream) -> std::io::Result<()> {
    sockopt::set_socket_keepalive(client, true)?;
    sockopt::set_tcp_keepidle(client, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(client, KEEPALIVE_INTERVAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn opened_ports(spec: serde_json::Value) -> Vec<String> {
        let spec = serde_json::from_value(spec).unwrap();
        let text = |port: HostPort| {
            let protocol = match port.protocol {
                HostPortProtocol::Tcp => "",
                HostPortProtocol::Udp => " UDP",
            };
            format!("{} {}{protocol}", port.listen, port.pod_port)
        };
        supported(&spec).into_iter().map(text).collect()
    }

    #[test]
    fn ports_of_containers_and_sidecars_are_opened() {
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
        let messages = |spec: &serde_json::Value| {
            unsupported(&serde_json::from_value(spec.clone()).unwrap()).join("\n")
        };
        assert_eq!(
            messages(&spec),
            "host port 1008/SCTP is closed: only TCP and UDP are forwarded to pods"
        );
        assert_eq!(
            opened_ports(spec.clone()),
            [
                "0.0.0.0:1002 2",
                "127.0.0.1:1004 4",
                "0.0.0.0:1005 5 UDP",
                "[::1]:1007 7"
            ]
        );
        let mut on_host = spec;
        on_host["hostNetwork"] = json!(true);
        assert_eq!(messages(&on_host), "");
        assert!(opened_ports(on_host).is_empty());
    }

    #[test]
    fn listen_errors_have_hints() {
        let at = "0.0.0.0:80".parse().unwrap();
        let error = |kind: std::io::ErrorKind| listen_error(at, &kind.into());
        assert!(error(std::io::ErrorKind::AddrInUse).starts_with("host port 80: already in use"));
        assert!(error(std::io::ErrorKind::PermissionDenied).contains("higher"));
        assert!(error(std::io::ErrorKind::AddrNotAvailable).contains("0.0.0.0:80"));
    }

    #[tokio::test]
    async fn keepalive_is_enabled_for_clients() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let client = TcpStream::connect(to).await.unwrap();
        assert!(!sockopt::socket_keepalive(&client).unwrap());
        set_keepalive(&client).unwrap();
        assert!(sockopt::socket_keepalive(&client).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&client).unwrap(), KEEPALIVE_IDLE);
    }
}
