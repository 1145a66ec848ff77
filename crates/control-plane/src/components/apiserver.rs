//! kube-apiserver: the only component that listens on the host's network.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::dir::ControlPlaneDir;
use crate::protocol::ClusterConfig;

/// The file with the egress selector configuration.
pub(super) const EGRESS_FILE: &str = "egress-selector.yaml";

pub(super) fn flags(config: &ClusterConfig, cp_dir: &ControlPlaneDir) -> Vec<String> {
    let pki = |name: &str| cp_dir.pki_file(name);
    let mut flags = vec![
        format!("--etcd-servers=unix://{}", cp_dir.store_socket().display()),
        "--bind-address=0.0.0.0".to_owned(),
        format!("--secure-port={}", config.api_port),
        // The leader's reserved socket is bound to the port too; see `port.rs`.
        "--permit-port-sharing=true".to_owned(),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        "--anonymous-auth=false".to_owned(),
        format!("--client-ca-file={}", pki("client-ca.crt")),
        format!("--token-auth-file={}", pki("tokens.csv")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        // Otherwise a new Node is tainted until the controller-manager handles it. Our nodes register as Ready.
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
        // Service addresses exist only in the pod network; the egress proxy connects to endpoints.
        "--enable-aggregator-routing=true".to_owned(),
        format!("--egress-selector-config-file={}", pki(EGRESS_FILE)),
        // Otherwise open watches delay the shutdown by a minute.
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

/// Sends all traffic to the cluster through a proxy on a Unix socket.
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

/// The first and the last address of a CIDR.
pub fn address_range(cidr: &str) -> Option<RangeInclusive<Ipv4Addr>> {
    let (first, bits) = cidr.split_once('/')?;
    let first: Ipv4Addr = first.parse().ok()?;
    let size = u32::MAX.checked_shr(bits.parse().ok()?)?;
    let last = u32::from(first).checked_add(size)?;
    Some(first..=Ipv4Addr::from(last))
}

/// The first address of a service range: the address of the `kubernetes` service.
pub fn first_service_address(cidr: &str) -> Option<Ipv4Addr> {
    let first = u32::from(*address_range(cidr)?.start());
    first.checked_add(1).map(Ipv4Addr::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_service_address_follows_network_address() {
        let first = first_service_address("100.96.0.0/16").unwrap();
        assert_eq!(first, Ipv4Addr::new(100, 96, 0, 1));
        assert_eq!(first_service_address("nonsense"), None);
    }
}
