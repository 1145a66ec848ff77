//! The cluster's storage provisioner. It runs in the leader and deletes the cluster's volumes when the cluster ends.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use kube::Client;
use slurm::{Slurm, SlurmError};
use tokio::task::{AbortHandle, JoinHandle};
use volumes::provisioner::{self, Provisioner, RemoveDir};

use crate::node_dir;

/// A running provisioner.
pub struct Storage {
    client: Client,
    dir: PathBuf,
    owner: Owner,
    serving: AbortHandle,
    sweeping: JoinHandle<()>,
}

/// Starts it; `None` if there is no directory for shared volumes.
pub fn start(client: Client, slurm: Slurm, owner: Owner) -> Option<Storage> {
    // Beside the image store, on the file system that all nodes share.
    let dir = images::ImageStore::default_path()?.with_file_name("volumes");
    let provisioner = Provisioner::new(client.clone(), &dir, remove(), &owner.line());
    let serving = tokio::spawn(provisioner.run()).abort_handle();
    let sweeping = tokio::spawn(sweep(dir.clone(), slurm, owner.clone()));
    Some(Storage {
        client,
        dir,
        owner,
        serving,
        sweeping,
    })
}

impl Storage {
    /// Stops the provisioner and deletes the volumes that belong to this cluster alone.
    pub async fn end(self, patience: Duration) {
        self.serving.abort();
        let line = self.owner.line();
        let removing = async {
            let _ = self.sweeping.await;
            // Most clusters have no volumes, so check before making requests.
            if provisioner::marked_clusters(&self.dir).contains(&line) {
                Provisioner::new(self.client, &self.dir, remove(), &line)
                    .remove_all()
                    .await;
            }
        };
        if tokio::time::timeout(patience, removing).await.is_err() {
            tracing::warn!(
                dir = %self.dir.display(),
                "there was no time to remove all volumes that end with their cluster; your next one does it"
            );
        }
    }
}

/// Deletes the volumes of clusters that were killed before they could do so.
async fn sweep(dir: PathBuf, slurm: Slurm, ours: Owner) {
    let mut over = provisioner::marked_clusters(&dir);
    // Job ids of another Slurm cluster with the same home directory mean nothing here.
    let job = |line: &str| {
        let owner = Owner::parse(line)?;
        (owner.slurm == ours.slurm && owner.job != ours.job).then_some(owner.job)
    };
    for line in over.clone() {
        let is_over = match job(&line) {
            None => false,
            Some(job) => match slurm.job_detail(job).await {
                Ok(job) => job.has_ended(),
                Err(error) => matches!(error, SlurmError::JobGone { .. }),
            },
        };
        if !is_over {
            over.remove(&line);
        }
    }
    provisioner::remove_marked_volumes(&dir, &remove(), &over).await;
}

/// The owner of a volume, recorded beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The name of the Slurm cluster.
    pub slurm: String,
    pub job: u32,
    /// The name of the cluster; a job may have several.
    pub cluster: String,
}

impl Owner {
    fn line(&self) -> String {
        format!("{} {} {}", self.job, self.cluster, self.slurm)
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(3, ' ');
        Some(Self {
            job: words.next()?.parse().ok()?,
            cluster: words.next()?.to_owned(),
            slurm: words.next()?.to_owned(),
        })
    }
}

fn remove() -> RemoveDir {
    Arc::new(|dir| node_dir::remove_elsewhere(dir).boxed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_round_trips_as_one_line() {
        for slurm in ["lab", "", "two words"] {
            let owner = Owner {
                slurm: slurm.to_owned(),
                job: 12,
                cluster: "coracle-12-ab34".to_owned(),
            };
            assert_eq!(Owner::parse(&owner.line()), Some(owner));
        }
        for line in ["", "12", "12 coracle-12-ab34", "x y z"] {
            assert_eq!(Owner::parse(line), None, "{line}");
        }
    }
}
