//! The pod manager: the pods of this node, for the kubelet's HTTPS API.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kubelet_api::stats::{LogLine, NodeSource};
use kubelet_api::{
    AttachOptions, ContainerLogStream, ContainerSession, ExecOptions, LogError, LogOptions,
    LogStream, PodSource, PortConnection, SessionError, container_status,
};
use pod_protocol::connection::{ConnectionError, SandboxClient};
use pod_protocol::{LogQuery, LogSource};

use super::launcher::PodRecords;
use super::log_reads::{LogReads, rest_options};
use super::spec::phase;
use super::streaming;

/// The pods bound to this node, each with its newest status and the connection to its sandbox.
#[derive(Default)]
pub struct PodManager {
    pods: Mutex<HashMap<String, Entry>>,
    /// The logs of pods whose sandbox has exited.
    records: OnceLock<Arc<dyn PodRecords>>,
    /// Node statistics.
    node: OnceLock<Arc<dyn NodeSource>>,
    /// The agent's log.
    log: OnceLock<AgentLog>,
    sync_loop_running: AtomicBool,
    log_reads: Arc<LogReads>,
}

/// Returns the latest lines of the agent's log, oldest first.
pub type AgentLog = Box<dyn Fn() -> Vec<LogLine> + Send + Sync>;

/// Marks the sync loop as running until it is dropped.
pub(super) struct SyncLoopGuard(Arc<PodManager>);

impl Drop for SyncLoopGuard {
    fn drop(&mut self) {
        self.0.sync_loop_running.store(false, Ordering::Relaxed);
    }
}

struct Entry {
    /// The API server's pod, with the kubelet's status if that is newer.
    pod: Arc<Pod>,
    status: Option<PodStatus>,
    sandbox: Option<SandboxClient>,
}

impl PodManager {
    /// A manager without pods.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the source of the logs of pods whose sandbox has exited.
    pub(crate) fn set_records(&self, records: Arc<dyn PodRecords>) {
        let _ = self.records.set(records);
    }

    /// Sets the source of the agent's log.
    pub fn set_agent_log(&self, log: AgentLog) {
        let _ = self.log.set(log);
    }

    /// Sets the source of node statistics.
    pub(crate) fn set_node_source(&self, node: Arc<dyn NodeSource>) {
        let _ = self.node.set(node);
    }

    /// Marks the sync loop as running, for as long as the guard lives.
    pub(super) fn start_sync_loop(self: &Arc<Self>) -> SyncLoopGuard {
        self.sync_loop_running.store(true, Ordering::Relaxed);
        SyncLoopGuard(Arc::clone(self))
    }

    pub(crate) fn is_sync_loop_running(&self) -> bool {
        self.sync_loop_running.load(Ordering::Relaxed)
    }

    /// The latest lines of the agent's log.
    pub(crate) fn agent_log(&self) -> Vec<LogLine> {
        self.log.get().map(|log| log()).unwrap_or_default()
    }

    /// All pods, with their sandboxes if these are connected.
    pub(crate) fn pods_with_sandboxes(&self) -> Vec<(Arc<Pod>, Option<SandboxClient>)> {
        let open = |entry: &Entry| entry.sandbox.clone().filter(|sandbox| !sandbox.is_closed());
        let pods = self.pods.lock().unwrap();
        pods.values()
            .map(|entry| (Arc::clone(&entry.pod), open(entry)))
            .collect()
    }

    /// Adds a pod, or replaces it by a newer version.
    pub(crate) fn update_pod(&self, uid: &str, pod: Arc<Pod>) {
        let mut pods = self.pods.lock().unwrap();
        let (status, sandbox) = pods
            .remove(uid)
            .map_or((None, None), |entry| (entry.status, entry.sandbox));
        let entry = Entry {
            pod: with_status(&pod, status.as_ref()),
            status,
            sandbox,
        };
        pods.insert(uid.to_owned(), entry);
    }

    /// Removes a pod that the API server has deleted.
    pub(crate) fn remove_pod(&self, uid: &str) {
        self.pods.lock().unwrap().remove(uid);
    }

    /// Removes all other pods.
    pub(crate) fn retain(&self, uids: &HashSet<String>) {
        self.pods
            .lock()
            .unwrap()
            .retain(|uid, _| uids.contains(uid));
    }

    /// Sets the status that a pod's worker has generated.
    pub(crate) fn set_status(&self, uid: &str, status: &PodStatus) {
        if let Some(entry) = self.pods.lock().unwrap().get_mut(uid)
            && entry.status.as_ref() != Some(status)
        {
            entry.status = Some(status.clone());
            entry.pod = with_status(&entry.pod, Some(status));
        }
    }

    /// Sets the connection to a pod's sandbox.
    pub(crate) fn set_sandbox(&self, uid: &str, sandbox: SandboxClient) {
        if let Some(entry) = self.pods.lock().unwrap().get_mut(uid) {
            entry.sandbox = Some(sandbox);
        }
    }

    pub(crate) fn get(&self, uid: &str) -> Option<Arc<Pod>> {
        let pods = self.pods.lock().unwrap();
        pods.get(uid).map(|entry| Arc::clone(&entry.pod))
    }

    /// The connection to a pod's sandbox.
    fn sandbox(&self, uid: &str) -> Result<SandboxClient, SessionError> {
        let pods = self.pods.lock().unwrap();
        let entry = pods.get(uid);
        let entry = entry.ok_or_else(|| SessionError::not_found("pod does not exist"))?;
        let sandbox = entry.sandbox.clone().filter(|sandbox| !sandbox.is_closed());
        sandbox.ok_or_else(|| {
            let name = entry.pod.metadata.name.as_deref().unwrap_or_default();
            let phase = phase(&entry.pod);
            if phase.is_terminal() {
                let phase = phase.as_str();
                SessionError::not_found(format!("pod {name:?} has terminated (phase {phase})"))
            } else {
                SessionError::internal(format!("pod {name:?} has no running sandbox"))
            }
        })
    }

    /// Removes the connection to a pod's sandbox.
    pub(crate) fn clear_sandbox(&self, uid: &str) {
        if let Some(entry) = self.pods.lock().unwrap().get_mut(uid) {
            entry.sandbox = None;
        }
    }
}

fn with_status(pod: &Arc<Pod>, status: Option<&PodStatus>) -> Arc<Pod> {
    let Some(status) = status else {
        return Arc::clone(pod);
    };
    let mut pod = Pod::clone(pod);
    let mut status = status.clone();
    // The kubelet's conditions are complete; add those of other components.
    let ours = status.conditions.get_or_insert_default();
    let server = pod.status.take().and_then(|status| status.conditions);
    for condition in server.into_iter().flatten() {
        if ours.iter().all(|own| own.type_ != condition.type_) {
            ours.push(condition);
        }
    }
    pod.status = Some(status);
    Arc::new(pod)
}

impl PodSource for PodManager {
    fn node(&self) -> Option<Arc<dyn NodeSource>> {
        self.node.get().cloned()
    }

    fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods
            .lock()
            .unwrap()
            .values()
            .map(|entry| Arc::clone(&entry.pod))
            .collect()
    }

    fn logs(
        &self,
        uid: &str,
        options: LogOptions,
    ) -> BoxFuture<'static, Result<ContainerLogStream, LogError>> {
        let pods = self.pods.lock().unwrap();
        let entry = pods.get(uid);
        let sandbox = entry.and_then(|entry| entry.sandbox.clone());
        let records = entry.and_then(|_| self.records.get().cloned());
        let container_id = entry.and_then(|entry| container_id(&entry.pod, &options.container));
        let reads = Arc::clone(&self.log_reads);
        let uid = uid.to_owned();
        Box::pin(async move {
            let query = log_query(options.clone());
            let observe = |log| reads.observe(&uid, &options, container_id, log);
            if let Some(sandbox) = sandbox.filter(|sandbox| !sandbox.is_closed()) {
                match sandbox.logs(&query).await {
                    Ok(log) => {
                        let log = log.map_err(io::Error::other).boxed();
                        return Ok::<ContainerLogStream, LogError>(observe(log));
                    }
                    // The pod has ended, and the sandbox exited during this request.
                    Err(ConnectionError::Lost { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            // The sandbox has exited: read the log that it has left.
            let log = match records {
                Some(records) => records.logs(&uid, query).await,
                None => None,
            };
            let log = log.ok_or("the pod's log files were removed")?;
            Ok(observe(log.map_err(|problem| problem.message)?))
        })
    }

    fn exec(
        &self,
        uid: &str,
        options: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        let sandbox = self.sandbox(uid);
        Box::pin(async move { streaming::exec(sandbox?, options).await })
    }

    fn is_attachable(&self, uid: &str, container: &str) -> bool {
        let starts_soon = || {
            let pod = self.get(uid);
            self.sandbox(uid).is_ok() && pod.is_some_and(|pod| !has_started(&pod, container))
        };
        self.log_reads.is_recent(uid, container) || starts_soon()
    }

    fn attach(
        &self,
        uid: &str,
        options: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        let container = &options.container;
        let sandbox = self.sandbox(uid);
        let id = self.get(uid).and_then(|pod| container_id(&pod, container));
        let seen = self.log_reads.take(uid, container, id.as_deref());
        let rest = seen.map(|seen| (seen, self.logs(uid, rest_options(container.clone()))));
        Box::pin(async move {
            let attached = match sandbox {
                Ok(sandbox) => streaming::attach(sandbox, options, seen).await,
                Err(error) => Err(error),
            };
            match (attached, rest) {
                // The sandbox has exited.
                (Err(error), Some((seen, rest))) => {
                    let rest = rest.await.map_err(|_| error)?;
                    Ok(streaming::log_session(rest, seen))
                }
                (attached, _) => attached,
            }
        })
    }

    fn port_forward(
        &self,
        uid: &str,
        port: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>> {
        let sandbox = self.sandbox(uid);
        Box::pin(async move { streaming::port_forward(sandbox?, port).await })
    }
}

fn container_id(pod: &Pod, container: &str) -> Option<String> {
    container_status(pod, container)?.container_id.clone()
}

fn has_started(pod: &Pod, container: &str) -> bool {
    container_id(pod, container).is_some_and(|id| !id.is_empty())
}

fn log_query(options: LogOptions) -> LogQuery {
    let stream = match options.stream {
        LogStream::All => LogSource::All,
        LogStream::Stdout => LogSource::Stdout,
        LogStream::Stderr => LogSource::Stderr,
    };
    LogQuery {
        container: options.container,
        previous: options.previous,
        follow: options.follow,
        tail_lines: options.tail_lines,
        since: options.since.map(|time| time.to_string()),
        timestamps: options.timestamps,
        limit_bytes: options.limit_bytes,
        stream,
    }
}
