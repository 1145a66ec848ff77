//! Requests and renews the certificate of one volume source, until its pod is forgotten.
//!
//! ```text
//!   key generated ──► request created ──► issued ──► (refresh time) ──► key generated …
//!                        ▲       │  │
//!                        └deleted┘  └──► denied, failed: end
//! ```
//!
//! Keys are only in the memory of this process and of the pod's sandbox, and in the pod's volume, which is in memory too. A
//! restarted kubelet requests new certificates, as upstream's does.

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
use volumes::content::{CredentialBundle, pem};

use super::super::tokens::random_u64;
use super::private_key::{self, PrivateKey};
use super::request_watch::{RequestOutcome, RequestsReceiver, full_name, wait_for_outcome};
use super::state::{CertificateState, IssuedCertificate, RefusalKind, SignerRefusal};
use crate::api_call::call;
use crate::backoff::ExponentialBackoff;

const MAX_RENEWAL_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Spreads the renewals of a node's pods.
const JITTER_MILLIS: u64 = 300_000;
/// Minimum time until a renewal, whatever times the signer sets.
const MIN_RENEWAL_INTERVAL: Duration = Duration::from_secs(60);

/// The pod and the source that a certificate is for.
#[derive(Clone, Debug)]
pub(super) struct CertificateSpec {
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    pub account: String,
    pub node: String,
    pub projection: PodCertificateProjection,
}

/// The task that requests and renews one certificate.
pub(super) struct CertificateRenewal {
    pub client: Client,
    pub spec: CertificateSpec,
    pub requests: RequestsReceiver,
    pub state: watch::Sender<CertificateState>,
}

impl CertificateRenewal {
    /// Returns only if the signer refuses.
    pub(super) async fn run(self) {
        loop {
            match self.obtain().await {
                Ok(issued) => {
                    let renew = issued.renew;
                    self.state.send_replace(CertificateState {
                        issued: Some(issued),
                        ..Default::default()
                    });
                    tokio::time::sleep_until(renew).await;
                }
                Err(refusal) => {
                    let set = |state: &mut CertificateState| state.refusal = Some(refusal);
                    self.state.send_modify(set);
                    return;
                }
            }
        }
    }

    /// Obtains a new certificate for a new key. Retries until it succeeds or the signer refuses.
    async fn obtain(&self) -> Result<IssuedCertificate, SignerRefusal> {
        let mut backoff = ExponentialBackoff::up_to(MAX_RENEWAL_RETRY_DELAY);
        let mut unused = None;
        loop {
            let key = match unused.take() {
                Some(key) => Ok(key),
                None => self.new_key().await,
            };
            let why = match key {
                Ok(key) => match self.request(&key).await {
                    Ok(request) => match self.wait(&key, &request).await {
                        SignerResponse::Issued(issued) => return Ok(issued),
                        SignerResponse::Refused(refusal) => return Err(refusal),
                        SignerResponse::RequestDeleted => format!(
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
            self.set_pending(why);
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    async fn new_key(&self) -> Result<PrivateKey, String> {
        let key_type = self.spec.projection.key_type.clone();
        // Generating an RSA key would block other tasks for a second.
        let generated = tokio::task::spawn_blocking(move || private_key::generate(&key_type)).await;
        match generated {
            Ok(generated) => generated.map_err(|error| error.to_string()),
            Err(error) => Err(format!("while generating a key: {error}")),
        }
    }

    /// Creates the request. The API server verifies the proof of possession, and NodeRestriction the other fields.
    async fn request(&self, key: &PrivateKey) -> Result<PodCertificateRequest, String> {
        let spec = &self.spec;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &spec.namespace);
        let account = call(accounts.get(&spec.account)).await.map_err(|error| {
            let account = format!("{}/{}", spec.namespace, spec.account);
            format!("while fetching service account {account:?}: {error}")
        })?;
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = call(nodes.get(&spec.node))
            .await
            .map_err(|error| format!("while fetching node {:?}: {error}", spec.node))?;
        let text = |text: Option<String>| text.unwrap_or_default();
        let request = spec.request(
            text(account.metadata.uid),
            text(node.metadata.uid),
            &key.proof,
        );
        let requests: Api<PodCertificateRequest> =
            Api::namespaced(self.client.clone(), &spec.namespace);
        call(requests.create(&PostParams::default(), &request))
            .await
            .map_err(|error| {
                let signer = &spec.projection.signer_name;
                format!("while creating a PodCertificateRequest for signer {signer:?}: {error}")
            })
    }

    /// Waits until the signer responds, or the request is deleted.
    async fn wait(&self, key: &PrivateKey, request: &PodCertificateRequest) -> SignerResponse {
        let name = full_name(request);
        let signer = &self.spec.projection.signer_name;
        self.set_pending(format!(
            "signer {signer:?} has not answered PodCertificateRequest {name}"
        ));
        let requests = self.requests.clone();
        let namespace = &self.spec.namespace;
        let own_name = request.metadata.name.as_deref().unwrap_or_default();
        match wait_for_outcome(requests, namespace, own_name).await {
            RequestOutcome::Issued(status) => match issued_certificate(key, &status) {
                Some(issued) => SignerResponse::Issued(issued),
                None => SignerResponse::Refused(SignerRefusal {
                    request: name,
                    kind: RefusalKind::Failed,
                    reason: "NoCertificate".to_owned(),
                    message: format!("signer {signer:?} has issued no certificate"),
                }),
            },
            RequestOutcome::Refused(refusal) => SignerResponse::Refused(refusal),
            RequestOutcome::Deleted => SignerResponse::RequestDeleted,
        }
    }

    /// Sets why there is no new certificate yet. Notifies watchers only if the pod has no certificate at all.
    fn set_pending(&self, why: String) {
        self.state.send_if_modified(|state| {
            let changed = state.issued.is_none() && state.pending.as_ref() != Some(&why);
            if state.issued.is_some() {
                tracing::info!(
                    pod = %format_args!("{}/{}", self.spec.namespace, self.spec.pod),
                    why,
                    "renewing pod certificate"
                );
            }
            state.pending = Some(why);
            changed
        });
    }
}

/// How a signer has responded to a request.
enum SignerResponse {
    Issued(IssuedCertificate),
    Refused(SignerRefusal),
    RequestDeleted,
}

impl CertificateSpec {
    /// The request object, like that of upstream's kubelet.
    fn request(&self, account: String, node: String, proof: &[u8]) -> PodCertificateRequest {
        PodCertificateRequest {
            metadata: ObjectMeta {
                namespace: Some(self.namespace.clone()),
                generate_name: Some("req-".to_owned()),
                // Deleted with the pod.
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

/// Converts the signer's status, with times on this machine's clock. `None` if it contains no certificate.
fn issued_certificate(
    key: &PrivateKey,
    status: &PodCertificateRequestStatus,
) -> Option<IssuedCertificate> {
    let chain = status.certificate_chain.as_deref().unwrap_or_default();
    // As in upstream, only the PEM blocks are copied, and no text between them.
    let blocks = pem::certificates(chain);
    if blocks.is_empty() {
        return None;
    }
    let encode = |der: &Vec<u8>| pem::encode(pem::CERTIFICATE, der);
    let now = Instant::now();
    let jitter = Duration::from_millis(random_u64() % JITTER_MILLIS);
    Some(IssuedCertificate {
        credentials: CredentialBundle {
            key: key.pem.clone(),
            chain: blocks.iter().map(encode).collect(),
        },
        renew: now + (until(status.begin_refresh_at.as_ref()) + jitter).max(MIN_RENEWAL_INTERVAL),
        expires: now + until(status.not_after.as_ref()),
    })
}

fn until(time: Option<&Time>) -> Duration {
    let seconds = time.map_or(0, |time| time.0.as_second() - Timestamp::now().as_second());
    Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
}
