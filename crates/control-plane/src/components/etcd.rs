//! etcd: the store, in memory, behind a Unix socket that only we can reach.

use crate::home::Home;

pub(super) fn flags(home: &Home) -> Vec<String> {
    let socket = format!("unix://{}", home.store_socket().display());
    let peer = format!("unix://{}.peer", home.store_socket().display());
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
