//! Watches the PodCertificateRequests of this node.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use k8s_openapi::api::certificates::v1::{PodCertificateRequest, PodCertificateRequestStatus};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::state::{RefusalKind, SignerRefusal};
use crate::resolve::watch_events::watch_events;

const MAX_REQUEST_WATCH_RETRY_DELAY: Duration = Duration::from_secs(5);
/// A created request that the watch does not show within this time counts as deleted.
const UNSEEN_TIMEOUT: Duration = Duration::from_secs(600);

/// All requests of this node. The watch starts with the first certificate. The Node authorizer allows no other requests.
pub(super) struct RequestWatch {
    client: Client,
    node: String,
    started: OnceLock<StartedWatch>,
}

struct StartedWatch {
    requests: RequestsReceiver,
    _task: AbortOnDropHandle<()>,
}

/// By namespace and name.
type RequestTable = HashMap<(String, String), Arc<PodCertificateRequest>>;
/// The current requests.
pub(super) type RequestsReceiver = watch::Receiver<Arc<RequestTable>>;

/// The outcome of a request.
#[derive(Debug)]
pub(super) enum RequestOutcome {
    Issued(PodCertificateRequestStatus),
    Refused(SignerRefusal),
    /// The request was deleted before the signer responded.
    Deleted,
}

impl RequestWatch {
    pub(super) fn new(client: Client, node: String) -> Self {
        Self {
            client,
            node,
            started: OnceLock::new(),
        }
    }

    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// Starts the watch, if it is not running yet.
    pub(super) fn watch(&self) -> RequestsReceiver {
        let started = self.started.get_or_init(|| {
            let (sender, requests) = watch::channel(Arc::default());
            let task = watch_all(self.client.clone(), self.node.clone(), sender);
            StartedWatch {
                requests,
                _task: AbortOnDropHandle::new(tokio::spawn(task)),
            }
        });
        started.requests.clone()
    }
}

/// Waits for the outcome of a request that was just created.
pub(super) async fn wait_for_outcome(
    mut requests: RequestsReceiver,
    namespace: &str,
    name: &str,
) -> RequestOutcome {
    let key = (namespace.to_owned(), name.to_owned());
    let unseen_deadline = Instant::now() + UNSEEN_TIMEOUT;
    let mut was_seen = false;
    loop {
        let found = requests.borrow_and_update().get(&key).cloned();
        match found {
            Some(request) => {
                was_seen = true;
                if let Some(outcome) = outcome(&request) {
                    return outcome;
                }
            }
            None if was_seen => return RequestOutcome::Deleted,
            None => {}
        }
        let changed = requests.changed();
        let changed = if was_seen {
            changed.await
        } else {
            match tokio::time::timeout_at(unseen_deadline, changed).await {
                Ok(changed) => changed,
                Err(_) => return RequestOutcome::Deleted,
            }
        };
        if changed.is_err() {
            // The watch was dropped: the kubelet is ending.
            std::future::pending::<()>().await;
        }
    }
}

/// `None` until the signer has responded.
fn outcome(request: &PodCertificateRequest) -> Option<RequestOutcome> {
    let status = request.status.as_ref()?;
    let conditions = status.conditions.iter().flatten();
    let decided = conditions
        .filter(|condition| condition.status == "True")
        .find_map(|condition| match condition.type_.as_str() {
            "Issued" => Some((None, condition)),
            "Denied" => Some((Some(RefusalKind::Denied), condition)),
            "Failed" => Some((Some(RefusalKind::Failed), condition)),
            _ => None,
        });
    let (refused, condition) = decided?;
    Some(match refused {
        None => RequestOutcome::Issued(status.clone()),
        Some(kind) => RequestOutcome::Refused(SignerRefusal {
            request: full_name(request),
            kind,
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        }),
    })
}

/// `NAMESPACE/NAME` of a request.
pub(super) fn full_name(request: &PodCertificateRequest) -> String {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &request.metadata;
    format!("{}/{}", text(&metadata.namespace), text(&metadata.name))
}

async fn watch_all(client: Client, node: String, sender: watch::Sender<Arc<RequestTable>>) {
    let api: Api<PodCertificateRequest> = Api::all(client);
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let mut listed = RequestTable::new();
    let handle = |event| match event {
        watcher::Event::Init => listed.clear(),
        watcher::Event::InitApply(request) => insert(&mut listed, request),
        watcher::Event::InitDone => {
            sender.send_replace(Arc::new(std::mem::take(&mut listed)));
        }
        watcher::Event::Apply(request) => {
            sender.send_modify(|requests| insert(Arc::make_mut(requests), request));
        }
        watcher::Event::Delete(request) => {
            sender.send_modify(|requests| _ = Arc::make_mut(requests).remove(&key(&request)));
        }
    };
    let objects = "PodCertificateRequests";
    watch_events(api, config, MAX_REQUEST_WATCH_RETRY_DELAY, objects, handle).await;
}

fn insert(requests: &mut RequestTable, mut request: PodCertificateRequest) {
    request.metadata.managed_fields = None;
    requests.insert(key(&request), Arc::new(request));
}

fn key(request: &PodCertificateRequest) -> (String, String) {
    let metadata = &request.metadata;
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}
