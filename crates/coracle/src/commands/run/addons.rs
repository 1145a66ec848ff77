//! Add-ons that `coracle run` starts in a ready cluster: the storage provisioner and `metrics.k8s.io`.

use std::time::Duration;

use cluster::Cluster;
use slurm::{Allocation, Slurm};

use super::metrics::{self, MetricsServer};
use super::storage::{self, StorageProvisioner, VolumeOwner};

/// The running add-ons.
pub struct Addons {
    storage: Option<StorageProvisioner>,
    /// Dropping it stops the API.
    metrics: Option<MetricsServer>,
}

impl Addons {
    /// Starts them in a ready cluster.
    pub async fn start(cluster: &Cluster, slurm: Slurm, allocation: &Allocation) -> Self {
        let owner = VolumeOwner {
            slurm: allocation.cluster.clone().unwrap_or_default(),
            job: allocation.job_id,
            cluster: cluster.name.clone(),
        };
        Self {
            storage: storage::start(cluster.client.clone(), slurm, owner),
            metrics: serve_metrics(cluster).await,
        }
    }

    /// Stops them and deletes the volumes that belong to this cluster alone.
    pub async fn stop(self, timeout: Duration) {
        drop(self.metrics);
        if let Some(storage) = self.storage {
            storage.stop(timeout).await;
        }
    }
}

/// Failures are only logged, because a cluster works without metrics.
async fn serve_metrics(cluster: &Cluster) -> Option<MetricsServer> {
    let host = cluster.advertised_address()?;
    match metrics::start(cluster.client.clone(), cluster.pki(), host).await {
        Ok(metrics) => Some(metrics),
        Err(error) => {
            tracing::warn!(error = format!("{error:#}"), "metrics.k8s.io is not served");
            None
        }
    }
}
