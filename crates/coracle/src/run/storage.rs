//! The storage provisioner of a cluster: runs beside the leader, and takes the cluster's volumes away at its end.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use kube::Client;
use tokio::task::AbortHandle;
use volumes::provisioner::{Provisioner, Remove};

use crate::node::place;

/// A provisioner that serves claims.
pub struct Storage {
    client: Client,
    dir: PathBuf,
    serving: AbortHandle,
}

/// Starts it, if there is a place for shared volumes at all.
pub fn start(client: Client) -> Option<Storage> {
    // Beside the images: on the file system that all nodes see.
    let dir = images::Store::default_path()?.with_file_name("volumes");
    let provisioner = Provisioner::new(client.clone(), &dir, remove());
    let serving = tokio::spawn(provisioner.run()).abort_handle();
    Some(Storage {
        client,
        dir,
        serving,
    })
}

impl Storage {
    /// Removes what belongs to this cluster alone, as long as the API server still answers.
    pub async fn end(self, patience: Duration) {
        self.serving.abort();
        // Most clusters have no volumes, and an API server that Slurm has told to end would keep us waiting.
        if !std::fs::read_dir(&self.dir).is_ok_and(|mut all| all.next().is_some()) {
            return;
        }
        let removing = Provisioner::remove_all(self.client, &self.dir, remove());
        if tokio::time::timeout(patience, removing).await.is_err() {
            tracing::warn!(dir = %self.dir.display(), "some of the cluster's volumes are left");
        }
    }
}

fn remove() -> Remove {
    Arc::new(|dir| place::remove_elsewhere(dir).boxed())
}
