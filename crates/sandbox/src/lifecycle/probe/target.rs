//! The port and address of a probe or hook.

use std::fmt;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::{TcpStream, lookup_host};

use crate::container_runtime::ContainerRuntime;

/// Resolves a port by its number, or by its name in the container's spec.
pub fn port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => container
            .ports
            .iter()
            .flatten()
            .find(|port| port.name.as_deref() == Some(name))
            .map(|port| port.container_port)
            .ok_or_else(|| format!("port {name:?} not found"))?,
    };
    u16::try_from(number)
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("invalid port number: {number}"))
}

/// A host, by name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetAddress {
    /// Without the brackets of IPv6.
    pub host: String,
    /// Port number.
    pub port: u16,
}

impl TargetAddress {
    /// The host of the spec, else the pod's address.
    pub fn new(host: Option<&str>, pod: Option<IpAddr>, port: u16) -> Self {
        let host = match host {
            Some(host) if !host.is_empty() => host.trim_matches(['[', ']']).to_owned(),
            _ => pod.map(|ip| ip.to_string()).unwrap_or_default(),
        };
        Self { host, port }
    }

    /// Connects from the pod's network. Errors have Go's texts, as upstream.
    pub async fn connect<R: ContainerRuntime>(&self, runtime: &R) -> Result<TcpStream, String> {
        let ip = self
            .resolve()
            .await
            .map_err(|error| format!("dial tcp: lookup {}: {error}", self.host))?;
        runtime
            .connect(ip, self.port)
            .await
            .map_err(|error| format!("dial tcp {self}: connect: {}", connect_error_text(&error)))
    }

    async fn resolve(&self) -> std::io::Result<IpAddr> {
        if let Ok(ip) = self.host.parse() {
            return Ok(ip);
        }
        if self.host == "localhost" {
            return Ok(IpAddr::from([127, 0, 0, 1]));
        }
        lookup_host((self.host.as_str(), self.port))
            .await?
            .next()
            .map(|address| address.ip())
            .ok_or_else(|| std::io::Error::other("no such host"))
    }
}

impl fmt::Display for TargetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// The text of a connect error as Go prints it.
pub(crate) fn connect_error_text(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        ErrorKind::TimedOut => "connection timed out".to_owned(),
        ErrorKind::HostUnreachable => "no route to host".to_owned(),
        ErrorKind::NetworkUnreachable => "network is unreachable".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    #[test]
    fn ports_are_resolved() {
        let container: Container =
            from_value(json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}))
                .expect("a container");
        for (wanted, result) in [
            (IntOrString::Int(80), Ok(80)),
            (
                IntOrString::Int(0),
                Err("invalid port number: 0".to_owned()),
            ),
            (
                IntOrString::Int(70_000),
                Err("invalid port number: 70000".to_owned()),
            ),
            (IntOrString::String("web".to_owned()), Ok(8080)),
            (
                IntOrString::String("x".to_owned()),
                Err("port \"x\" not found".to_owned()),
            ),
        ] {
            assert_eq!(port(&wanted, &container), result);
        }
    }

    #[test]
    fn address_defaults_to_pod_ip() {
        let six: IpAddr = "fd00::1".parse().expect("an address");
        assert_eq!(
            TargetAddress::new(None, Some(six), 80).to_string(),
            "[fd00::1]:80"
        );
        assert_eq!(
            TargetAddress::new(Some("h"), Some(six), 80).to_string(),
            "h:80"
        );
        assert_eq!(TargetAddress::new(Some(""), Some(six), 80).host, "fd00::1");
    }
}
