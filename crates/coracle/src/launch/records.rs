//! Logs and checkpoints of this node's sandboxes, which stay in the node's directory after the sandboxes have ended.

use std::io;
use std::path::PathBuf;

use futures::FutureExt;
use futures::future::BoxFuture;
use kubelet::PodRecords;
use pod_protocol::connection::LogByteStream;
use pod_protocol::{LogQuery, PodState, RequestError};
use sandbox::lifecycle::checkpoint;
use sandbox::runtime::logs::LogDir;

use crate::node_dir;
use crate::roles::remove::{self, RemovedDir};

/// The records of the pods of this node.
#[derive(Clone, Debug)]
pub struct NodeRecords {
    /// The node's directory.
    pub node_dir: PathBuf,
    /// The parent cgroup of the pods' cgroups, if there is one.
    pub pods_cgroup: Option<PathBuf>,
}

impl PodRecords for NodeRecords {
    fn uids(&self) -> BoxFuture<'_, Vec<String>> {
        let dir = node_dir::pods(&self.node_dir);
        async move {
            let list = move || -> Vec<String> {
                let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
                entries
                    .map(|entry| entry.file_name().to_string_lossy().into_owned())
                    .collect()
            };
            tokio::task::spawn_blocking(list).await.unwrap_or_default()
        }
        .boxed()
    }

    fn checkpoint(&self, uid: &str) -> BoxFuture<'_, Option<PodState>> {
        let dir = node_dir::pod(&self.node_dir, uid);
        async move {
            let from = dir.clone();
            let read = tokio::task::spawn_blocking(move || checkpoint::read(&from)).await;
            let read = read.map_err(io::Error::other).flatten();
            read.unwrap_or_else(|error| {
                tracing::warn!(dir = %dir.display(), %error, "ignoring the pod's checkpoint");
                None
            })
        }
        .boxed()
    }

    fn logs(
        &self,
        uid: &str,
        query: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogByteStream, RequestError>>> {
        let dir = node_dir::pod(&self.node_dir, uid).join("logs");
        async move {
            if !dir.exists() {
                return None;
            }
            Some(LogDir::new(dir).read(&query).await)
        }
        .boxed()
    }

    fn remove(&self, uid: &str) -> BoxFuture<'_, io::Result<()>> {
        let dir = node_dir::pod(&self.node_dir, uid);
        let group = (self.pods_cgroup.as_ref())
            .map(|pods_cgroup| sandbox::runtime::pod_cgroup(pods_cgroup, uid));
        async move {
            if dir.exists() {
                remove::run_process(dir, RemovedDir::Pod).await?;
            }
            // A sandbox removes its pod's cgroup itself, unless it was killed.
            if let Some(group) = group
                && let Err(error) = group.remove()
            {
                tracing::warn!(group = %group.path().display(), %error, "cannot remove the pod's cgroup");
            }
            Ok(())
        }
        .boxed()
    }
}
