//! What `coracle run` adds to a cluster that is ready: the storage provisioner and `metrics.k8s.io`.

use std::time::Duration;

use cluster::Cluster;
use slurm::{Allocation, Slurm};

use super::metrics::{self, Metrics};
use super::storage::{self, Owner, Storage};

/// The running add-ons.
pub struct Addons {
    storage: Option<Storage>,
    /// Held because the API is served until it is dropped.
    metrics: Option<Metrics>,
}

impl Addons {
    /// Starts them in a cluster that is ready.
    pub async fn start(cluster: &Cluster, slurm: Slurm, allocation: &Allocation) -> Self {
        let owner = Owner {
            slurm: allocation.cluster.clone().unwrap_or_default(),
            job: allocation.job_id,
            cluster: cluster.name.clone(),
        };
        Self {
            storage: storage::start(cluster.client.clone(), slurm, owner),
            metrics: serve_metrics(cluster).await,
        }
    }

    /// Stops them, and removes the volumes that belong to this cluster alone.
    pub async fn stop(self, timeout: Duration) {
        drop(self.metrics);
        if let Some(storage) = self.storage {
            storage.end(timeout).await;
        }
    }
}

/// A cluster works without metrics, so a failure is only logged.
async fn serve_metrics(cluster: &Cluster) -> Option<Metrics> {
    let host = cluster.advertised_address()?;
    match metrics::start(cluster.client.clone(), cluster.pki(), host).await {
        Ok(metrics) => Some(metrics),
        Err(error) => {
            tracing::warn!(error = format!("{error:#}"), "metrics.k8s.io is not served");
            None
        }
    }
}
