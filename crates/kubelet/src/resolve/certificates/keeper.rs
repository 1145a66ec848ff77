//! One source's certificate for as long as its pod is here: asked for, kept, renewed in time.
//!
//! ```text
//!   key made ──► request created ──► issued ──► (time passes) ──► key made …
//!                   ▲       │  │
//!                   └─ gone ┘  └──► denied, failed: the end
//! ```
//!
//! Keys are in this process's memory, in that of the pod's sandbox and in the pod's volume, which is in memory too. A kubelet
//! that begins anew asks for new certificates, as upstream's does.

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    PodCertificateRequest, PodCertificateRequestSpec, PodCertificateRequestStatus,
};
use k8s_openapi::api::core::v1::{Node, PodCertificateProjection, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use volumes::content::{Credentials, pem};

use super::super::tokens::random;
use super::key::{self, Key};
use super::requests::{Outcome, Seen, full_name, settled};
use super::standing::{Issued, Refusal, Standing};
use crate::api::call;
use crate::backoff::Doubling;

/// How long to wait at most before a request is made again.
const RETRY_AT_MOST: Duration = Duration::from_secs(60);
/// Not all pods of a node renew at the same moment.
const JITTER_MILLIS: u64 = 300_000;
/// However odd a signer's times are, certificates are not asked for in a loop.
const SOONEST: Duration = Duration::from_secs(60);

/// Who asks for a certificate, and for which.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    pub account: String,
    pub node: String,
    pub projection: PodCertificateProjection,
}

/// Keeps one certificate.
pub(super) struct Keeper {
    pub client: Client,
    pub wish: Wish,
    pub requests: Seen,
    pub standing: watch::Sender<Standing>,
}

impl Keeper {
    /// Ends only when the signer refuses.
    pub(super) async fn keep(self) {
        loop {
            match self.obtain().await {
                Ok(issued) => {
                    let renew = issued.renew;
                    self.standing.send_replace(Standing {
                        issued: Some(issued),
                        ..Default::default()
                    });
                    tokio::time::sleep_until(renew).await;
                }
                Err(refusal) => {
                    let set = |standing: &mut Standing| standing.refusal = Some(refusal);
                    self.standing.send_modify(set);
                    return;
                }
            }
        }
    }

    /// A new certificate for a new key, however long that takes.
    async fn obtain(&self) -> Result<Issued, Refusal> {
        let mut waits = Doubling::up_to(RETRY_AT_MOST);
        let mut unused = None;
        loop {
            let key = match unused.take() {
                Some(key) => Ok(key),
                None => self.new_key().await,
            };
            let why = match key {
                Ok(key) => match self.request(&key).await {
                    Ok(request) => match self.answer(&key, &request).await {
                        Answer::Issued(issued) => return Ok(issued),
                        Answer::Refused(refusal) => return Err(refusal),
                        Answer::Gone => format!(
                            "PodCertificateRequest {} appears to have been deleted",
                            full_name(&request)
                        ),
                    },
                    Err(why) => {
                        unused = Some(key);
                        why
                    }
                },
                Err(why) => why,
            };
            self.trouble(why);
            tokio::time::sleep(waits.wait()).await;
        }
    }

    async fn new_key(&self) -> Result<Key, String> {
        let key_type = self.wish.projection.key_type.clone();
        // One of type RSA would stop everything else for a second.
        let made = tokio::task::spawn_blocking(move || key::generate(&key_type)).await;
        match made {
            Ok(made) => made.map_err(|error| error.to_string()),
            Err(error) => Err(format!("while generating a key: {error}")),
        }
    }

    /// Asks the signer; the API server checks that the key is ours, and NodeRestriction all the rest.
    async fn request(&self, key: &Key) -> Result<PodCertificateRequest, String> {
        let wish = &self.wish;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &wish.namespace);
        let account = call(accounts.get(&wish.account)).await.map_err(|error| {
            let account = format!("{}/{}", wish.namespace, wish.account);
            format!("while fetching service account {account:?}: {error}")
        })?;
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = call(nodes.get(&wish.node))
            .await
            .map_err(|error| format!("while fetching node {:?}: {error}", wish.node))?;
        let text = |text: Option<String>| text.unwrap_or_default();
        let request = wish.request(
            text(account.metadata.uid),
            text(node.metadata.uid),
            &key.proof,
        );
        let requests: Api<PodCertificateRequest> =
            Api::namespaced(self.client.clone(), &wish.namespace);
        call(requests.create(&PostParams::default(), &request))
            .await
            .map_err(|error| {
                let signer = &wish.projection.signer_name;
                format!("while creating a PodCertificateRequest for signer {signer:?}: {error}")
            })
    }

    async fn answer(&self, key: &Key, request: &PodCertificateRequest) -> Answer {
        let name = full_name(request);
        let signer = &self.wish.projection.signer_name;
        self.trouble(format!(
            "signer {signer:?} has not answered PodCertificateRequest {name}"
        ));
        let seen = self.requests.clone();
        let namespace = &self.wish.namespace;
        let own_name = request.metadata.name.as_deref().unwrap_or_default();
        match settled(seen, namespace, own_name).await {
            Outcome::Issued(status) => match issued(key, &status) {
                Some(issued) => Answer::Issued(issued),
                None => Answer::Refused(Refusal {
                    request: name,
                    kind: "Failed",
                    reason: "NoCertificate".to_owned(),
                    message: format!("signer {signer:?} has issued no certificate"),
                }),
            },
            Outcome::Refused(refusal) => Answer::Refused(refusal),
            Outcome::Gone => Answer::Gone,
        }
    }

    /// Why there is no certificate yet. A pod that has one is none the wiser for it.
    fn trouble(&self, why: String) {
        self.standing.send_if_modified(|standing| {
            let is_news = standing.issued.is_none() && standing.trouble.as_ref() != Some(&why);
            if standing.issued.is_some() {
                tracing::info!(
                    pod = %format_args!("{}/{}", self.wish.namespace, self.wish.pod),
                    why,
                    "a certificate is being renewed"
                );
            }
            standing.trouble = Some(why);
            is_news
        });
    }
}

/// What became of a request.
enum Answer {
    Issued(Issued),
    Refused(Refusal),
    Gone,
}

impl Wish {
    /// The object, as upstream's kubelet makes it.
    fn request(&self, account: String, node: String, proof: &[u8]) -> PodCertificateRequest {
        PodCertificateRequest {
            metadata: ObjectMeta {
                namespace: Some(self.namespace.clone()),
                generate_name: Some("req-".to_owned()),
                // Gone with the pod.
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Pod".to_owned(),
                    name: self.pod.clone(),
                    uid: self.uid.clone(),
                    ..Default::default()
                }]),
                ..Default::default()
            },
            spec: PodCertificateRequestSpec {
                signer_name: self.projection.signer_name.clone(),
                pod_name: self.pod.clone(),
                pod_uid: self.uid.clone(),
                service_account_name: self.account.clone(),
                service_account_uid: account,
                node_name: self.node.clone(),
                node_uid: node,
                max_expiration_seconds: self.projection.max_expiration_seconds,
                stub_pkc_s10_request: ByteString(proof.to_vec()),
                unverified_user_annotations: self.projection.user_annotations.clone(),
            },
            status: None,
        }
    }
}

/// What the signer granted, on this machine's clock; `None` if that has no certificate in it.
fn issued(key: &Key, status: &PodCertificateRequestStatus) -> Option<Issued> {
    let chain = status.certificate_chain.as_deref().unwrap_or_default();
    // Only the blocks themselves, as upstream: what signers write between them is not for pods.
    let blocks = pem::certificates(chain);
    if blocks.is_empty() {
        return None;
    }
    let encode = |der: &Vec<u8>| pem::encode(pem::CERTIFICATE, der);
    let now = Instant::now();
    let jitter = Duration::from_millis(random() % JITTER_MILLIS);
    Some(Issued {
        credentials: Credentials {
            key: key.pem.clone(),
            chain: blocks.iter().map(encode).collect(),
        },
        renew: now + (until(status.begin_refresh_at.as_ref()) + jitter).max(SOONEST),
        expires: now + until(status.not_after.as_ref()),
    })
}

fn until(time: Option<&Time>) -> Duration {
    let seconds = time.map_or(0, |time| time.0.as_second() - Timestamp::now().as_second());
    Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
}
