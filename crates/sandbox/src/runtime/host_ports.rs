//! `hostPort`: connections to a port of the machine are carried to a port of the pod.
//!
//! A sandbox is in the machine's own network, and has sockets made in the pod's: it needs nobody else for this, and it goes on
//! without its kubelet. Whoever reaches the machine reaches the port; the pod asked for that. TCP only.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::exec::connect;
use super::inside::Inside;

/// So many connections to a port are carried at once; more wait for their turn.
const CONNECTIONS: usize = 512;
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
        for (from, to) in wanted(spec) {
            let listener = TcpListener::bind(from).await;
            let listener = listener.map_err(|error| refusal(from, &error))?;
            listeners.push((listener, SocketAddr::new(pod, to)));
        }
        let serve = |(listener, to)| {
            let serving = tokio::task::spawn_local(serve(listener, to, inside.clone()));
            serving.abort_handle()
        };
        Ok(Self(listeners.into_iter().map(serve).collect()))
    }
}

/// Where to listen, and for which port of the pod.
fn wanted(spec: &PodSpec) -> Vec<(SocketAddr, u16)> {
    if spec.host_network == Some(true) {
        // They are the machine's already.
        return vec![];
    }
    let is_sidecar = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let sidecars = spec.init_containers.iter().flatten().filter(is_sidecar);
    let ports = sidecars
        .chain(&spec.containers)
        .flat_map(|container| container.ports.iter().flatten());
    ports
        .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
        .filter_map(|port| {
            let number = |port: i32| u16::try_from(port).ok().filter(|port| *port > 0);
            let address = port.host_ip.as_deref().and_then(|ip| ip.parse().ok());
            let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
            let from = SocketAddr::new(address, number(port.host_port?)?);
            Some((from, number(port.container_port)?))
        })
        .collect()
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
        tokio::io::copy_bidirectional(&mut client, &mut server).await
    };
    if let Err(error) = carried.await {
        tracing::trace!(%error, %to, "a connection to a host port was cut");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(spec: serde_json::Value) -> Vec<String> {
        let spec = serde_json::from_value(spec).unwrap();
        let wanted = wanted(&spec).into_iter();
        wanted.map(|(from, to)| format!("{from} {to}")).collect()
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
                    {"containerPort": 6, "hostPort": 0}, {"containerPort": 7, "hostPort": 1007, "hostIP": "::1"}]}],
        });
        assert_eq!(
            of(spec.clone()),
            ["0.0.0.0:1002 2", "127.0.0.1:1004 4", "[::1]:1007 7"]
        );
        let mut on_host = spec;
        on_host["hostNetwork"] = json!(true);
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
}
