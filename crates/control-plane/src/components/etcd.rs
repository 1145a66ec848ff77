//! etcd: on a Unix socket in the control plane's private directory.

use crate::dir::ControlPlaneDir;
use crate::protocol::ClusterConfig;
use crate::storage::ClusterStorage;

pub(super) fn flags(config: &ClusterConfig, cp_dir: &ControlPlaneDir) -> Vec<String> {
    let socket = format!("unix://{}", cp_dir.store_socket().display());
    // Relative on purpose: with an absolute path etcd creates an abstract socket, to which every user of the host could
    // connect. The working directory is the control plane's directory.
    let peer = "unix://peer.sock";
    let mut flags = vec![
        "--name=coracle".to_owned(),
        format!("--data-dir={}", cp_dir.store().display()),
        format!("--listen-client-urls={socket}"),
        format!("--advertise-client-urls={socket}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=coracle={peer}"),
        // A single member needs no wait for others before it elects itself.
        "--heartbeat-interval=10".to_owned(),
        "--election-timeout=50".to_owned(),
        "--log-level=warn".to_owned(),
        "--log-outputs=stderr".to_owned(),
    ];
    if config.storage == ClusterStorage::Memory {
        flags.push("--unsafe-no-fsync".to_owned());
    }
    flags
}
