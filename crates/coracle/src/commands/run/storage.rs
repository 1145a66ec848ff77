//! The cluster's storage provisioner. It runs in the leader and deletes the cluster's shared volumes when the cluster ends, unless
//! their reclaim policy is Retain.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use kube::Client;
use slurm::{Slurm, SlurmError};
use tokio::task::{AbortHandle, JoinHandle};
use volumes::provisioner::{self, Provisioner, RemoveDir};

use crate::roles::remove::{self, RemovedDir};

/// A running provisioner.
pub struct StorageProvisioner {
    client: Client,
    dir: PathBuf,
    owner: VolumeOwner,
    provisioning: AbortHandle,
    leftovers: JoinHandle<()>,
}

/// Starts the provisioner; `None` if there is no directory for shared volumes.
pub fn start(client: Client, slurm: Slurm, owner: VolumeOwner) -> Option<StorageProvisioner> {
    // Beside the image store, on the file system that all nodes share.
    let dir = images::ImageStore::default_path()?.with_file_name("volumes");
    let provisioner = Provisioner::new(client.clone(), &dir, remove_dir(), &owner.line());
    let provisioning = tokio::spawn(provisioner.run()).abort_handle();
    let leftovers = tokio::spawn(remove_leftovers(dir.clone(), slurm, owner.clone()));
    Some(StorageProvisioner {
        client,
        dir,
        owner,
        provisioning,
        leftovers,
    })
}

impl StorageProvisioner {
    /// Stops the provisioner and deletes this cluster's shared volumes with the reclaim policy Delete.
    pub async fn stop(self, timeout: Duration) {
        self.provisioning.abort();
        let line = self.owner.line();
        let removing = async {
            let _ = self.leftovers.await;
            // Most clusters have no volumes, so check before `remove_all` lists them at the API server.
            if provisioner::marked_clusters(&self.dir).contains(&line) {
                Provisioner::new(self.client, &self.dir, remove_dir(), &line)
                    .remove_all()
                    .await;
            }
        };
        if tokio::time::timeout(timeout, removing).await.is_err() {
            tracing::warn!(
                dir = %self.dir.display(),
                "timed out deleting the volumes of this cluster; your next cluster deletes the rest"
            );
        }
    }
}

/// Deletes the volumes of clusters that were killed before they could do so.
async fn remove_leftovers(dir: PathBuf, slurm: Slurm, own: VolumeOwner) {
    let mut ended = provisioner::marked_clusters(&dir);
    // Another Slurm cluster may have the same home directory. Its job ids cannot be looked up here, so its volumes are kept.
    let job = |line: &str| {
        let owner = VolumeOwner::parse(line)?;
        (owner.slurm == own.slurm && owner.job != own.job).then_some(owner.job)
    };
    for line in ended.clone() {
        let has_ended = match job(&line) {
            None => false,
            Some(job) => match slurm.job_detail(job).await {
                Ok(job) => job.has_ended(),
                Err(error) => matches!(error, SlurmError::JobGone { .. }),
            },
        };
        if !has_ended {
            ended.remove(&line);
        }
    }
    provisioner::remove_marked_volumes(&dir, &remove_dir(), &ended).await;
}

/// The owner of a volume, recorded beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeOwner {
    /// The name of the Slurm cluster.
    pub slurm: String,
    pub job: u32,
    /// The name of the cluster; a job may have several.
    pub cluster: String,
}

impl VolumeOwner {
    fn line(&self) -> String {
        format!("{} {} {}", self.job, self.cluster, self.slurm)
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(3, ' ');
        Some(Self {
            job: fields.next()?.parse().ok()?,
            cluster: fields.next()?.to_owned(),
            slurm: fields.next()?.to_owned(),
        })
    }
}

fn remove_dir() -> RemoveDir {
    Arc::new(|dir| remove::run_process(dir, RemovedDir::Volume).boxed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_round_trips_as_one_line() {
        for slurm in ["lab", "", "two words"] {
            let owner = VolumeOwner {
                slurm: slurm.to_owned(),
                job: 12,
                cluster: "coracle-12-ab34".to_owned(),
            };
            assert_eq!(VolumeOwner::parse(&owner.line()), Some(owner));
        }
        for line in ["", "12", "12 coracle-12-ab34", "x y z"] {
            assert_eq!(VolumeOwner::parse(line), None, "{line}");
        }
    }
}
