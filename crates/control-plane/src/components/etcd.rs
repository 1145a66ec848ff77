//! etcd: the store, in memory, behind a Unix socket that only we can reach.

use crate::home::Home;

pub(super) fn flags(home: &Home) -> Vec<String> {
    let socket = format!("unix://{}", home.store_socket().display());
    // Relative on purpose: with an absolute path etcd takes the empty host for an abstract socket, which
    // every user of the host could connect to. The working directory is the private place.
    let peer = "unix://peer.sock";
    vec![
        "--name=coracle".to_owned(),
        format!("--data-dir={}", home.store().display()),
        format!("--listen-client-urls={socket}"),
        format!("--advertise-client-urls={socket}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=coracle={peer}"),
        // A member that is alone need not wait a second for others before it elects itself.
        "--heartbeat-interval=10".to_owned(),
        "--election-timeout=50".to_owned(),
        // The store is in memory: there is no disk to wait for.
        "--unsafe-no-fsync".to_owned(),
        "--log-level=warn".to_owned(),
        "--log-outputs=stderr".to_owned(),
    ]
}
