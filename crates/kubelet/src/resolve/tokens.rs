//! Service account tokens for projected volumes: bound to the pod, kept, and renewed in time.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

use super::{ASK_AGAIN, references};
use crate::api::{CallError, call_for_pod};

/// No token gets older than this, however long it would be valid.
const OLDEST: Duration = Duration::from_secs(24 * 60 * 60);
/// Not all pods of a node renew at the same moment.
const JITTER_MILLIS: u64 = 10_000;
/// How long to wait before the next attempt if a good token could not be renewed.
const RENEW_AGAIN: Duration = Duration::from_secs(10);

/// The tokens of a pod.
pub(super) struct Answer {
    /// By volume and index of its source.
    pub tokens: BTreeMap<(String, usize), Result<String, String>>,
    /// When one of them should be asked for again.
    pub again_at: Option<Instant>,
}

/// All tokens of this node's pods.
pub(super) struct Tokens {
    client: Client,
    known: Mutex<HashMap<Key, Token>>,
}

/// Whose token, for what.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    uid: String,
    namespace: String,
    pod: String,
    account: String,
    audience: Option<String>,
    seconds: Option<i64>,
}

#[derive(Clone)]
struct Token {
    text: String,
    expires: Instant,
    renew: Instant,
}

impl Tokens {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            known: Mutex::default(),
        }
    }

    /// The tokens that a pod's volumes hold.
    pub(super) async fn get(&self, pod: &Pod) -> Answer {
        let mut answer = Answer {
            tokens: BTreeMap::new(),
            again_at: None,
        };
        for volume in references::used_volumes(pod) {
            let parts = volume
                .projected
                .as_ref()
                .and_then(|source| source.sources.as_deref());
            for (index, part) in parts.unwrap_or_default().iter().enumerate() {
                let Some(projection) = &part.service_account_token else {
                    continue;
                };
                let (token, again_at) = self.token(&key(pod, projection)).await;
                answer.tokens.insert((volume.name.clone(), index), token);
                answer.again_at = answer.again_at.into_iter().chain([again_at]).min();
            }
        }
        answer
    }

    /// A token, and when to ask for it again.
    async fn token(&self, key: &Key) -> (Result<String, String>, Instant) {
        let now = Instant::now();
        let known = self.lock().get(key).cloned();
        if let Some(token) = known.as_ref().filter(|token| now < token.renew) {
            return (Ok(token.text.clone()), token.renew);
        }
        match (self.request(key).await, known) {
            (Ok(token), _) => {
                self.lock().insert(key.clone(), token.clone());
                (Ok(token.text), token.renew)
            }
            (Err(error), Some(token)) if Instant::now() < token.expires => {
                tracing::warn!(
                    pod = %format_args!("{}/{}", key.namespace, key.pod),
                    error = &error as &dyn std::error::Error,
                    "could not renew a token"
                );
                (Ok(token.text), now + RENEW_AGAIN)
            }
            (Err(error), _) => (Err(error.to_string()), now + ASK_AGAIN),
        }
    }

    async fn request(&self, key: &Key) -> Result<Token, CallError> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &key.namespace);
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: key.audience.clone().map(|audience| vec![audience]),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: Some(key.pod.clone()),
                    uid: Some(key.uid.clone()),
                }),
                expiration_seconds: key.seconds,
                ..Default::default()
            }),
            ..Default::default()
        };
        let parameters = PostParams::default();
        let ask = || accounts.create_token_request(&key.account, &parameters, &request);
        call_for_pod(ask).await.map(|answer| token(&answer))
    }

    /// The pod is gone.
    pub(super) fn forget(&self, uid: &str) {
        self.lock().retain(|key, _| key.uid != uid);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Token>> {
        // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(pod: &Pod, projection: &ServiceAccountTokenProjection) -> Key {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let account = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.clone());
    Key {
        uid: text(&pod.metadata.uid),
        namespace: text(&pod.metadata.namespace),
        pod: text(&pod.metadata.name),
        account: account
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "default".to_owned()),
        audience: projection
            .audience
            .clone()
            .filter(|audience| !audience.is_empty()),
        seconds: projection.expiration_seconds,
    }
}

/// What the API server granted, on this machine's clock.
fn token(answer: &TokenRequest) -> Token {
    let status = answer.status.clone().unwrap_or_default();
    // As upstream, the life time is what was granted, and the beginning is reckoned back from the end.
    let spec = answer.spec.as_ref();
    let granted = spec
        .and_then(|spec| spec.expiration_seconds)
        .unwrap_or(3600);
    let end = status.expiration_timestamp;
    let left = end.map_or(granted, |end| {
        end.0.as_second() - Timestamp::now().as_second()
    });
    let now = Instant::now();
    let jitter = Duration::from_millis(random() % JITTER_MILLIS);
    let renew_in = renew_in(granted, left).saturating_sub(jitter);
    Token {
        text: status.token.unwrap_or_default(),
        expires: now + seconds(left),
        // However short its life, a token is not asked for in a loop.
        renew: now + renew_in.max(Duration::from_secs(1)),
    }
}

/// How long a token that was granted for `granted` seconds, `left` of which are left, is as good as new: until a fifth of its
/// life is left, or it is a day old.
fn renew_in(granted: i64, left: i64) -> Duration {
    let a_fifth_is_left = left - granted * 20 / 100;
    let age = granted - left;
    let a_day_old = i64::try_from(OLDEST.as_secs()).unwrap_or(i64::MAX) - age;
    seconds(a_fifth_is_left.min(a_day_old))
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or_default())
}

/// Some number.
pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without random bytes all pods renew at the same time, which is only unkind.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_renewed_as_upstream_does() {
        // An hour, just granted; half an hour later; ten minutes; a year; a year, granted 23 hours ago; overdue.
        let cases = [
            (3600, 3600),
            (3600, 1800),
            (600, 600),
            (31_536_000, 31_536_000),
            (31_536_000, 31_453_200),
            (600, 30),
        ];
        let waits = cases.map(|(granted, left)| renew_in(granted, left).as_secs());
        assert_eq!(waits, [2880, 1080, 480, 86_400, 3600, 0]);
    }
}
