//! Streams the logs of pods while manifests run.
//!
//! ```text
//!   pods ── runs.rs (which logs) ── reader.rs (one task per container) ── output.rs (one task) ──► standard output, files.rs
//!                                    cursor.rs (what was read), line.rs
//! ```
//!
//! Logs come through the API server, so they need nothing on the nodes. Memory, connections and descriptors are bounded, whatever the
//! number of pods.

mod cursor;
mod files;
mod line;
mod output;
mod reader;
mod runs;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::line::printable;
pub use self::output::{LastLines, LogStyle};
use self::output::{LogOutput, LogWriter};
use self::reader::{ContainerReader, ReadLimits};
use self::runs::{ContainerRuns, container_runs};

/// Time for the writing task to end.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// One container of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ContainerKey {
    pub namespace: String,
    pub pod: String,
    /// Distinguishes successive pods of the same name.
    pub uid: String,
    pub container: String,
}

impl ContainerKey {
    /// Namespace, pod and container.
    fn names(&self) -> (String, String, String) {
        (
            self.namespace.clone(),
            self.pod.clone(),
            self.container.clone(),
        )
    }
}

/// The logs of all pods.
pub struct PodLogs {
    client: Client,
    /// Containers that have run. An entry stays until the pod is deleted, so that no log is read twice.
    containers: HashMap<ContainerKey, watch::Sender<ContainerRuns>>,
    /// Containers of deleted pods whose logs are still being read.
    deleted: Vec<watch::Sender<ContainerRuns>>,
    readers: JoinSet<()>,
    limits: Arc<ReadLimits>,
    output: LogOutput,
    writer: LogWriter,
    last_lines: LastLines,
    closing: CancellationToken,
}

impl PodLogs {
    /// Starts without pods.
    pub fn new(client: Client, style: LogStyle) -> Self {
        let last_lines = LastLines::default();
        let (output, writer) = LogOutput::start(style, Arc::clone(&last_lines));
        Self {
            client,
            containers: HashMap::new(),
            deleted: Vec::new(),
            readers: JoinSet::new(),
            limits: Arc::default(),
            output,
            writer,
            last_lines,
            closing: CancellationToken::new(),
        }
    }

    /// The last line of each container.
    pub fn last_lines(&self) -> LastLines {
        Arc::clone(&self.last_lines)
    }

    /// Reads the logs of the pod's containers, given the pod's newest state.
    pub fn update(&mut self, pod: &Pod, is_deleted: bool) {
        while self.readers.try_join_next().is_some() {}
        self.deleted.retain(|runs| !runs.is_closed());
        for (container, runs) in container_runs(pod, is_deleted) {
            let key = ContainerKey {
                namespace: pod.namespace().unwrap_or_default(),
                pod: pod.name_any(),
                uid: pod.uid().unwrap_or_default(),
                container,
            };
            if let Some(sender) = self.containers.get(&key) {
                sender.send_if_modified(|old| {
                    let is_changed = *old != runs;
                    *old = runs;
                    is_changed
                });
            } else if runs.newest.is_some() && !is_deleted {
                self.start_reader(key.clone(), runs);
            }
            if is_deleted {
                self.deleted.extend(self.containers.remove(&key));
            }
        }
    }

    fn start_reader(&mut self, key: ContainerKey, runs: ContainerRuns) {
        let (sender, receiver) = watch::channel(runs);
        let reader = ContainerReader {
            pods: Api::namespaced(self.client.clone(), &key.namespace),
            container: Arc::new(key.clone()),
            runs: receiver,
            limits: Arc::clone(&self.limits),
            output: self.output.clone(),
            closing: self.closing.clone(),
        };
        self.readers.spawn(reader.run());
        self.containers.insert(key, sender);
    }

    /// Waits until the logs of all ended pods are read completely.
    pub async fn wait_for_ended_pods(&mut self) {
        while self.has_unread_ended_pods() && self.readers.join_next().await.is_some() {}
    }

    fn has_unread_ended_pods(&self) -> bool {
        // A reader that has ended has dropped its receiver.
        self.containers
            .values()
            .chain(&self.deleted)
            .any(|runs| runs.borrow().is_last && !runs.is_closed())
    }

    /// Writes what remains of open streams, after the nodes have ended.
    pub async fn close(mut self, timeout: Duration) {
        self.closing.cancel();
        let all = async { while self.readers.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(timeout, all).await;
        self.readers.shutdown().await;
        drop(self.output);
        self.writer.finish(WRITE_TIMEOUT).await;
    }
}
