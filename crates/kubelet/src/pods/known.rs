//! The pods of this node, for those who ask: the kubelet's HTTPS API.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kubelet_api::stats::{LogLine, NodeSource};
use kubelet_api::{
    AttachOptions, ContainerSession, ExecOptions, LogByteStream, LogError, LogOptions, LogStream,
    PodSource, PortConnection, SessionError,
};
use pod_protocol::LogQuery;
use pod_protocol::connection::{ConnectionError, SandboxClient};

use super::launch::Launcher;
use super::spec::{is_final, phase};
use super::streams;

/// The pods bound to this node, each with its newest status and the way to its sandbox.
#[derive(Default)]
pub struct KnownPods {
    pods: Mutex<HashMap<String, Entry>>,
    /// Reads the logs of pods whose sandbox has exited.
    launcher: OnceLock<Arc<dyn Launcher>>,
    /// Measures the node.
    node: OnceLock<Arc<dyn NodeSource>>,
    /// What this process has logged.
    log: OnceLock<OwnLog>,
    /// The API server's word on pods is followed.
    followed: AtomicBool,
}

/// What this process has logged lately, oldest first.
pub type OwnLog = Box<dyn Fn() -> Vec<LogLine> + Send + Sync>;

/// Says that pods are followed, as long as it lives.
pub(super) struct Followed(Arc<KnownPods>);

impl Drop for Followed {
    fn drop(&mut self) {
        self.0.followed.store(false, Ordering::Relaxed);
    }
}

struct Entry {
    /// As the API server last showed it, with the kubelet's status if that is newer.
    pod: Arc<Pod>,
    status: Option<PodStatus>,
    sandbox: Option<SandboxClient>,
}

impl KnownPods {
    /// No pods yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the launcher that reads the logs of pods whose sandbox has exited.
    pub(crate) fn read_logs_with(&self, launcher: Arc<dyn Launcher>) {
        let _ = self.launcher.set(launcher);
    }

    /// Where the log of this process is to be had.
    pub fn log_with(&self, log: OwnLog) {
        let _ = self.log.set(log);
    }

    /// Who measures the node.
    pub(crate) fn measure_with(&self, node: Arc<dyn NodeSource>) {
        let _ = self.node.set(node);
    }

    /// From now on pods are followed.
    pub(super) fn follow(self: &Arc<Self>) -> Followed {
        self.followed.store(true, Ordering::Relaxed);
        Followed(Arc::clone(self))
    }

    /// Whether pods are followed.
    pub(crate) fn is_followed(&self) -> bool {
        self.followed.load(Ordering::Relaxed)
    }

    /// What this process has logged lately.
    pub(crate) fn own_log(&self) -> Vec<LogLine> {
        self.log.get().map(|log| log()).unwrap_or_default()
    }

    /// All pods, with the sandboxes of those that can be asked.
    pub(crate) fn sandboxes(&self) -> Vec<(Arc<Pod>, Option<SandboxClient>)> {
        let open = |entry: &Entry| entry.sandbox.clone().filter(|sandbox| !sandbox.is_closed());
        let pods = self.lock();
        pods.values()
            .map(|entry| (Arc::clone(&entry.pod), open(entry)))
            .collect()
    }

    /// The API server shows a pod.
    pub(crate) fn seen(&self, uid: &str, pod: Arc<Pod>) {
        let mut pods = self.lock();
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

    /// The API server shows it no more.
    pub(crate) fn gone(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// The API server shows these and no others.
    pub(crate) fn retain(&self, uids: &HashSet<String>) {
        self.lock().retain(|uid, _| uids.contains(uid));
    }

    /// Its worker has concluded what its status is.
    pub(crate) fn concluded(&self, uid: &str, status: &PodStatus) {
        if let Some(entry) = self.lock().get_mut(uid)
            && entry.status.as_ref() != Some(status)
        {
            entry.status = Some(status.clone());
            entry.pod = with_status(&entry.pod, Some(status));
        }
    }

    /// Its sandbox can be asked.
    pub(crate) fn connected(&self, uid: &str, sandbox: SandboxClient) {
        if let Some(entry) = self.lock().get_mut(uid) {
            entry.sandbox = Some(sandbox);
        }
    }

    /// A pod as the API server last showed it.
    pub(crate) fn shown(&self, uid: &str) -> Option<Arc<Pod>> {
        let pods = self.lock();
        pods.get(uid).map(|entry| Arc::clone(&entry.pod))
    }

    /// A pod's sandbox, if it can be asked.
    fn reach(&self, uid: &str) -> Result<SandboxClient, SessionError> {
        let pods = self.lock();
        let entry = pods.get(uid);
        let entry = entry.ok_or_else(|| SessionError::not_found("pod does not exist"))?;
        let sandbox = entry.sandbox.clone().filter(|sandbox| !sandbox.is_closed());
        sandbox.ok_or_else(|| {
            let name = entry.pod.metadata.name.as_deref().unwrap_or_default();
            match phase(&entry.pod) {
                over if is_final(over) => SessionError::not_found(format!(
                    "pod {name:?} is over ({over}): nothing of it runs"
                )),
                _ => SessionError::internal(format!("pod {name:?} has no sandbox that runs")),
            }
        })
    }

    /// Its sandbox can't be asked any more.
    pub(crate) fn disconnected(&self, uid: &str) {
        if let Some(entry) = self.lock().get_mut(uid) {
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
    // Ours are said in full; others' are the API server's to know.
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

impl PodSource for KnownPods {
    fn node(&self) -> Option<Arc<dyn NodeSource>> {
        self.node.get().cloned()
    }

    fn pods(&self) -> Vec<Arc<Pod>> {
        self.lock()
            .values()
            .map(|entry| Arc::clone(&entry.pod))
            .collect()
    }

    fn logs(
        &self,
        uid: &str,
        options: LogOptions,
    ) -> BoxFuture<'static, Result<LogByteStream, LogError>> {
        let pods = self.lock();
        let entry = pods.get(uid);
        let sandbox = entry.and_then(|entry| entry.sandbox.clone());
        let launcher = entry.and_then(|_| self.launcher.get().cloned());
        let (uid, query) = (uid.to_owned(), query(options));
        Box::pin(async move {
            if let Some(sandbox) = sandbox.filter(|sandbox| !sandbox.is_closed()) {
                match sandbox.logs(&query).await {
                    Ok(log) => {
                        return Ok::<LogByteStream, LogError>(
                            log.map_err(io::Error::other).boxed(),
                        );
                    }
                    // Its pod is over, and it went in just this moment.
                    Err(ConnectionError::Lost { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            // Nothing is written to them any more.
            let log = match launcher {
                Some(launcher) => launcher.logs(&uid, query).await,
                None => None,
            };
            let log = log.ok_or("the pod's sandbox is gone, and its logs with it")?;
            Ok(log.map_err(|problem| problem.message)?)
        })
    }

    fn exec(
        &self,
        uid: &str,
        options: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        let found = self.reach(uid);
        Box::pin(async move { streams::exec(found?, options).await })
    }

    fn attach(
        &self,
        uid: &str,
        options: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        let found = self.reach(uid);
        Box::pin(async move { streams::attach(found?, options).await })
    }

    fn port_forward(
        &self,
        uid: &str,
        port: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>> {
        let found = self.reach(uid);
        Box::pin(async move { streams::port_forward(found?, port).await })
    }
}

fn query(options: LogOptions) -> LogQuery {
    let stream = match options.stream {
        LogStream::All => "All",
        LogStream::Stdout => "Stdout",
        LogStream::Stderr => "Stderr",
    };
    LogQuery {
        container: options.container,
        previous: options.previous,
        follow: options.follow,
        tail_lines: options.tail_lines,
        since: options.since.map(|time| time.to_string()),
        timestamps: options.timestamps,
        limit_bytes: options.limit_bytes,
        stream: Some(stream.to_owned()),
    }
}
