//! kube-scheduler: without leader election and without a listener.

use crate::dir::ControlPlaneDir;

pub(super) fn flags(cp_dir: &ControlPlaneDir) -> Vec<String> {
    let mut flags = vec![format!(
        "--kubeconfig={}",
        cp_dir.pki_file("kube-scheduler.kubeconfig")
    )];
    flags.extend(common_flags());
    flags
}

/// Common flags of the scheduler and the controller-manager. There is one of each, so no leader election; the API server
/// has no other users, so no throttling; and there is no metrics scraper, so no port.
pub(super) fn common_flags() -> impl Iterator<Item = String> {
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
