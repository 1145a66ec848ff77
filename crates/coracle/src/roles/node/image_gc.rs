//! Runs image garbage collection on the node when it is due.

use std::path::PathBuf;

use images::ImageGcPolicy;

use crate::node_dir;
use crate::roles::free_layers;

/// Checks disk usage periodically, and never returns.
pub async fn run(node_dir: PathBuf, policy: ImageGcPolicy) {
    let layers = node_dir::layers(&node_dir);
    loop {
        tokio::time::sleep(policy.interval).await;
        if !policy.is_due(&layers) {
            continue;
        }
        match free_layers::run_process(&layers, policy).await {
            Ok(result) => tracing::info!(result, "garbage-collected images"),
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "cannot remove unused images");
            }
        }
    }
}
