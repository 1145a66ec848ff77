//! The pods of this node, for those who ask: the kubelet's HTTPS API.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kubelet_api::{LogBytes, LogOptions, LogStream, NoLogs, PodSource};
use sandbox::connection::SandboxClient;
use sandbox::protocol::LogQuery;

/// The pods bound to this node, each with its newest status and the way to its sandbox.
#[derive(Default)]
pub struct KnownPods(Mutex<HashMap<String, Entry>>);

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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.lock()
            .values()
            .map(|entry| Arc::clone(&entry.pod))
            .collect()
    }

    fn logs(&self, uid: &str, options: LogOptions) -> BoxFuture<'static, Result<LogBytes, NoLogs>> {
        let pods = self.lock();
        let sandbox = pods.get(uid).and_then(|entry| entry.sandbox.clone());
        Box::pin(async move {
            let sandbox = sandbox.ok_or("the pod's sandbox is gone, and its logs with it")?;
            let log = sandbox.logs(&query(options)).await?;
            Ok::<LogBytes, NoLogs>(log.map_err(io::Error::other).boxed())
        })
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
