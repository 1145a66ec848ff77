//! kube-controller-manager: all of upstream's controllers, without leader election and without a listener.

use crate::dir::ControlPlaneDir;
use crate::protocol::ClusterConfig;

pub(super) fn flags(config: &ClusterConfig, cp_dir: &ControlPlaneDir) -> Vec<String> {
    let pki = |name: &str| cp_dir.pki_file(name);
    let signer = |purpose: &str, ca: &str| {
        [
            format!(
                "--cluster-signing-{purpose}-cert-file={}",
                pki(&format!("{ca}.crt"))
            ),
            format!(
                "--cluster-signing-{purpose}-key-file={}",
                pki(&format!("{ca}.key"))
            ),
        ]
    };
    let mut flags = vec![
        format!("--kubeconfig={}", pki("kube-controller-manager.kubeconfig")),
        format!("--cluster-name={}", config.name),
        "--allocate-node-cidrs=true".to_owned(),
        format!("--cluster-cidr={}", config.pod_cidr),
        "--node-cidr-mask-size=24".to_owned(),
        format!("--service-cluster-ip-range={}", config.service_cidr),
        format!("--root-ca-file={}", pki("cluster-ca.crt")),
        format!(
            "--service-account-private-key-file={}",
            pki("service-account.key")
        ),
        "--use-service-account-credentials=false".to_owned(),
    ];
    flags.extend(signer("kube-apiserver-client", "client-ca"));
    flags.extend(signer("kubelet-client", "client-ca"));
    flags.extend(signer("kubelet-serving", "kubelet-ca"));
    flags.extend(signer("legacy-unknown", "client-ca"));
    flags.extend(super::scheduler::common_flags());
    flags
}
