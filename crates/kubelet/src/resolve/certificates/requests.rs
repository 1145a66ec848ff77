//! The PodCertificateRequests of this node: what signers say to them.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::certificates::v1::{PodCertificateRequest, PodCertificateRequestStatus};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::standing::Refusal;
use crate::backoff::Doubling;

/// How long to wait at most between attempts to watch.
const RETRY_AT_MOST: Duration = Duration::from_secs(5);
/// A request that was made so long ago, and was never seen, has been deleted.
const UNSEEN: Duration = Duration::from_secs(600);

/// All requests that name this node, from the first one on. The Node authorizer lets a node watch no others.
pub(super) struct Requests {
    client: Client,
    node: String,
    following: OnceLock<Following>,
}

struct Following {
    known: Seen,
    _watch: AbortOnDropHandle<()>,
}

/// By namespace and name.
type Known = HashMap<(String, String), Arc<PodCertificateRequest>>;
/// What has been seen so far.
pub(super) type Seen = watch::Receiver<Arc<Known>>;

/// How a request has ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// There is a certificate.
    Issued(PodCertificateRequestStatus),
    /// There won't be one.
    Refused(Refusal),
    /// Somebody has deleted the request before the signer answered.
    Gone,
}

impl Requests {
    pub(super) fn new(client: Client, node: String) -> Self {
        Self {
            client,
            node,
            following: OnceLock::new(),
        }
    }

    /// The node that asks.
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// Follows requests, from now on at the latest.
    pub(super) fn follow(&self) -> Seen {
        let following = self.following.get_or_init(|| {
            let (tell, known) = watch::channel(Arc::default());
            let task = watch_all(self.client.clone(), self.node.clone(), tell);
            Following {
                known,
                _watch: AbortOnDropHandle::new(tokio::spawn(task)),
            }
        });
        following.known.clone()
    }
}

/// Waits for the end of a request that this node has made just now.
pub(super) async fn settled(mut seen: Seen, namespace: &str, name: &str) -> Outcome {
    let key = (namespace.to_owned(), name.to_owned());
    let give_up = Instant::now() + UNSEEN;
    let mut was_there = false;
    loop {
        let found = seen.borrow_and_update().get(&key).cloned();
        match found {
            Some(request) => {
                was_there = true;
                if let Some(outcome) = outcome(&request) {
                    return outcome;
                }
            }
            None if was_there => return Outcome::Gone,
            None => {}
        }
        let changed = seen.changed();
        let changed = if was_there {
            changed.await
        } else {
            match tokio::time::timeout_at(give_up, changed).await {
                Ok(changed) => changed,
                Err(_) => return Outcome::Gone,
            }
        };
        if changed.is_err() {
            // Nobody watches any more: the whole kubelet is about to end.
            std::future::pending::<()>().await;
        }
    }
}

/// `None` while the signer has not answered.
fn outcome(request: &PodCertificateRequest) -> Option<Outcome> {
    let status = request.status.as_ref()?;
    let conditions = status.conditions.iter().flatten();
    let last = conditions
        .filter(|condition| condition.status == "True")
        .find_map(|condition| match condition.type_.as_str() {
            "Issued" => Some((None, condition)),
            "Denied" => Some((Some("Denied"), condition)),
            "Failed" => Some((Some("Failed"), condition)),
            _ => None,
        });
    let (refused, condition) = last?;
    Some(match refused {
        None => Outcome::Issued(status.clone()),
        Some(kind) => Outcome::Refused(Refusal {
            request: full_name(request),
            kind,
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        }),
    })
}

/// Namespace and name of a request, for people.
pub(super) fn full_name(request: &PodCertificateRequest) -> String {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &request.metadata;
    format!("{}/{}", text(&metadata.namespace), text(&metadata.name))
}

async fn watch_all(client: Client, node: String, tell: watch::Sender<Arc<Known>>) {
    let api: Api<PodCertificateRequest> = Api::all(client);
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let events = watcher(api, config).backoff(Doubling::up_to(RETRY_AT_MOST));
    tokio::pin!(events);
    let mut listed = Known::new();
    loop {
        match events.try_next().await {
            Ok(Some(watcher::Event::Init)) => listed.clear(),
            Ok(Some(watcher::Event::InitApply(request))) => insert(&mut listed, request),
            Ok(Some(watcher::Event::InitDone)) => {
                tell.send_replace(Arc::new(std::mem::take(&mut listed)));
            }
            Ok(Some(watcher::Event::Apply(request))) => {
                tell.send_modify(|known| insert(Arc::make_mut(known), request));
            }
            Ok(Some(watcher::Event::Delete(request))) => {
                tell.send_modify(|known| _ = Arc::make_mut(known).remove(&key(&request)));
            }
            Ok(None) => return,
            Err(error) => tracing::debug!(
                error = &error as &dyn std::error::Error,
                "watching requests for certificates"
            ),
        }
    }
}

fn insert(known: &mut Known, mut request: PodCertificateRequest) {
    request.metadata.managed_fields = None;
    known.insert(key(&request), Arc::new(request));
}

fn key(request: &PodCertificateRequest) -> (String, String) {
    let metadata = &request.metadata;
    (
        metadata.namespace.clone().unwrap_or_default(),
        metadata.name.clone().unwrap_or_default(),
    )
}
