//! The flags of the upstream programs, as pure functions of the cluster's configuration; one file per program.

mod apiserver;
mod controller_manager;
mod etcd;
mod scheduler;

use std::collections::BTreeMap;

use crate::dir::ControlPlaneDir;
use crate::kubeconfig::kubeconfig;
use crate::pki::TlsIdentity;
use crate::protocol::{ClusterConfig, ControlPlaneComponent};

pub use apiserver::{address_range, first_service_address};

/// The command line of a component, without the program.
pub fn flags(
    component: ControlPlaneComponent,
    config: &ClusterConfig,
    cp_dir: &ControlPlaneDir,
) -> Vec<String> {
    match component {
        ControlPlaneComponent::Etcd => etcd::flags(config, cp_dir),
        ControlPlaneComponent::KubeApiserver => apiserver::flags(config, cp_dir),
        ControlPlaneComponent::KubeScheduler => scheduler::flags(cp_dir),
        ControlPlaneComponent::KubeControllerManager => controller_manager::flags(config, cp_dir),
    }
}

/// The environment of a component: nothing from the user, only settings of Go.
pub fn environment(config: &ClusterConfig) -> BTreeMap<&'static str, &'static str> {
    let mut env = BTreeMap::from([("HOME", "/tmp"), ("TMPDIR", "/tmp"), ("PATH", "/nowhere")]);
    if config.lowers_gogc {
        // Collect garbage rarely during the start, then as usual; see kubernetes/main.go.
        env.extend([("GOGC", "800"), ("CORACLE_REST_GOGC", "100")]);
    }
    env
}

/// The files that are derived from the configuration: component kubeconfigs and the egress selector.
pub fn derived_files(config: &ClusterConfig, cp_dir: &ControlPlaneDir) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for name in ["kube-controller-manager", "kube-scheduler"] {
        let file = |suffix: &str| config.files.get(&format!("{name}.{suffix}")).cloned();
        let identity = TlsIdentity {
            cert_pem: file("crt").unwrap_or_default(),
            key_pem: file("key").unwrap_or_default(),
        };
        let ca = config
            .files
            .get("cluster-ca.crt")
            .map_or("", String::as_str);
        let server = format!("https://127.0.0.1:{}", config.api_port);
        files.insert(
            format!("{name}.kubeconfig"),
            kubeconfig(&config.name, &server, ca, &identity),
        );
    }
    files.insert(
        apiserver::EGRESS_FILE.to_owned(),
        apiserver::egress_selector(&cp_dir.egress_socket()),
    );
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::ClusterStorage;

    fn config() -> ClusterConfig {
        ClusterConfig {
            name: "coracle-42".into(),
            release: "/opt/coracle/kubernetes/v1.37.1".into(),
            addresses: vec!["10.0.0.1".parse().unwrap(), "10.1.0.1".parse().unwrap()],
            api_port: 36443,
            service_cidr: "100.96.0.0/16".into(),
            pod_cidr: "100.64.0.0/11".into(),
            storage: ClusterStorage::Memory,
            seed: None,
            workload: None,
            lowers_gogc: true,
            log_dir: None,
            verbose: false,
            files: BTreeMap::new(),
            admin_kubeconfig: String::new(),
        }
    }

    #[test]
    fn flags_of_all_components() {
        let cp_dir = ControlPlaneDir::at("/tmp");
        for component in ControlPlaneComponent::ALL {
            let flags = flags(component, &config(), &cp_dir).join("\n");
            insta::assert_snapshot!(component.program(), flags);
        }
    }

    #[test]
    fn etcd_on_disk_uses_fsync() {
        let on_disk = ClusterConfig {
            storage: ClusterStorage::Disk("/home/user/state".into()),
            ..config()
        };
        let flags = |config: &ClusterConfig| {
            let dir = ControlPlaneDir::at("/tmp");
            flags(ControlPlaneComponent::Etcd, config, &dir)
        };
        let mut in_memory = flags(&config());
        in_memory.retain(|flag| flag != "--unsafe-no-fsync");
        assert_eq!(flags(&on_disk), in_memory);
    }

    #[test]
    fn derived_files_of_the_components() {
        let files = derived_files(&config(), &ControlPlaneDir::at("/tmp"));
        insta::assert_debug_snapshot!(files.keys().collect::<Vec<_>>());
        insta::assert_snapshot!("egress-selector", files[apiserver::EGRESS_FILE]);
    }
}
