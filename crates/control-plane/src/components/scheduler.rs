//! kube-scheduler: alone and without a listener.

use crate::home::Home;

pub(super) fn flags(home: &Home) -> Vec<String> {
    let mut flags = vec![format!(
        "--kubeconfig={}",
        home.pki_file("kube-scheduler.kubeconfig")
    )];
    flags.extend(quick_and_quiet());
    flags
}

/// What the scheduler and the controller-manager have in common: there is only one of each, so no
/// election; the API server is ours alone, so no throttling; nobody scrapes them, so no port.
pub(super) fn quick_and_quiet() -> impl Iterator<Item = String> {
    [
        "--leader-elect=false",
        "--kube-api-qps=2000",
        "--kube-api-burst=4000",
        "--secure-port=0",
        "--profiling=false",
        "--v=0",
    ]
    .into_iter()
    .map(str::to_owned)
}
