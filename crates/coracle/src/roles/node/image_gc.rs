//! Image garbage collection, as in upstream's kubelet: removes unpacked layers that no pod uses when the node's disk fills up.

use std::path::PathBuf;

use crate::node_dir;
use crate::roles::free_layers;
use crate::settings::image_gc::ImageGcPolicy;

/// Checks disk usage periodically, and never returns.
pub async fn run(node_dir: PathBuf, policy: ImageGcPolicy) {
    let layers = node_dir::layers(&node_dir);
    loop {
        tokio::time::sleep(policy.interval).await;
        let used = free_layers::disk_usage_percent(&node_dir);
        if used.is_none_or(|used| used < policy.high_threshold_percent) || !layers.exists() {
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
