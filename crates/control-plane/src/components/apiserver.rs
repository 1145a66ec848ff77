//! kube-apiserver: the only component that listens on the host's network.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::home::Home;
use crate::protocol::ClusterConfig;

/// The file that tells the API server how to reach nodes, pods and services.
pub(super) const EGRESS_FILE: &str = "egress-selector.yaml";

pub(super) fn flags(config: &ClusterConfig, home: &Home) -> Vec<String> {
    let pki = |name: &str| home.pki_file(name);
    let mut flags = vec![
        format!("--etcd-servers=unix://{}", home.store_socket().display()),
        "--bind-address=0.0.0.0".to_owned(),
        format!("--secure-port={}", config.api_port),
        // The port is held by a socket of ours that doesn't listen; see `port.rs`.
        "--permit-port-sharing=true".to_owned(),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        "--anonymous-auth=false".to_owned(),
        format!("--client-ca-file={}", pki("client-ca.crt")),
        format!("--token-auth-file={}", pki("tokens.csv")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        // A new Node would otherwise be tainted until the controller-manager looks at it; our nodes
        // register themselves as Ready when they are.
        "--disable-admission-plugins=TaintNodesByCondition".to_owned(),
        "--allow-privileged=true".to_owned(),
        format!("--service-cluster-ip-range={}", config.service_cidr),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".to_owned(),
        format!("--service-account-key-file={}", pki("service-account.pub")),
        format!(
            "--service-account-signing-key-file={}",
            pki("service-account.key")
        ),
        format!("--kubelet-certificate-authority={}", pki("kubelet-ca.crt")),
        format!("--kubelet-client-certificate={}", pki("kubelet-client.crt")),
        format!("--kubelet-client-key={}", pki("kubelet-client.key")),
        "--kubelet-preferred-address-types=InternalIP,Hostname".to_owned(),
        format!(
            "--requestheader-client-ca-file={}",
            pki("front-proxy-ca.crt")
        ),
        "--requestheader-allowed-names=front-proxy-client".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        format!("--proxy-client-cert-file={}", pki("front-proxy-client.crt")),
        format!("--proxy-client-key-file={}", pki("front-proxy-client.key")),
        // Service addresses exist only inside the pod network; endpoints are reached through the
        // egress selector.
        "--enable-aggregator-routing=true".to_owned(),
        format!("--egress-selector-config-file={}", pki(EGRESS_FILE)),
        // Clients that watch would otherwise keep a stopping server for a minute.
        "--shutdown-send-retry-after=true".to_owned(),
        "--shutdown-watch-termination-grace-period=1s".to_owned(),
        "--enable-priority-and-fairness=false".to_owned(),
        "--profiling=false".to_owned(),
        "--v=0".to_owned(),
    ];
    if let Some(address) = config.addresses.first() {
        flags.push(format!("--advertise-address={address}"));
    }
    flags
}

/// All traffic into the cluster goes through a proxy on a Unix socket.
pub(super) fn egress_selector(socket: &Path) -> String {
    format!(
        "apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    proxyProtocol: HTTPConnect
    transport:
      uds:
        udsName: {}
",
        socket.display()
    )
}

/// The first and the last address of a network.
pub fn network(cidr: &str) -> Option<RangeInclusive<Ipv4Addr>> {
    let (first, bits) = cidr.split_once('/')?;
    let first: Ipv4Addr = first.parse().ok()?;
    let size = u32::MAX.checked_shr(bits.parse().ok()?)?;
    let last = u32::from(first).checked_add(size)?;
    Some(first..=Ipv4Addr::from(last))
}

/// The first address of a service range, under which pods reach the API server.
pub fn first_service_address(cidr: &str) -> Option<Ipv4Addr> {
    let first = u32::from(*network(cidr)?.start());
    first.checked_add(1).map(Ipv4Addr::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_service_address_follows_the_network() {
        let first = first_service_address("100.96.0.0/16").unwrap();
        assert_eq!(first, Ipv4Addr::new(100, 96, 0, 1));
        assert_eq!(first_service_address("nonsense"), None);
    }
}
