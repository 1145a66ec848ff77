//! The token manager: service account tokens for projected volumes, bound to the pod, cached and renewed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

use super::{OBJECT_RETRY_INTERVAL, references};
use crate::api_call::{ApiCallError, call_for_bound_pod};

/// A token is renewed at this age, even if it is valid for longer.
const MAX_TOKEN_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Spreads the renewals of a node's pods.
const JITTER_MILLIS: u64 = 10_000;
/// Delay after a failed renewal of a token that is still valid.
const RENEW_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The tokens of a pod.
pub(super) struct PodTokens {
    /// By volume and index of its source.
    pub tokens: BTreeMap<(String, usize), Result<String, String>>,
    /// When to request one of them again.
    pub refresh_at: Option<Instant>,
}

/// Requests and caches the tokens of this node's pods.
pub(super) struct TokenManager {
    client: Client,
    tokens: Mutex<HashMap<TokenKey, Token>>,
}

/// Identifies a token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TokenKey {
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

impl TokenManager {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            tokens: Mutex::default(),
        }
    }

    /// The tokens of a pod's volumes.
    pub(super) async fn get(&self, pod: &Pod) -> PodTokens {
        let mut found = PodTokens {
            tokens: BTreeMap::new(),
            refresh_at: None,
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
                let (token, refresh_at) = self.token(&key(pod, projection)).await;
                found.tokens.insert((volume.name.clone(), index), token);
                found.refresh_at = found.refresh_at.into_iter().chain([refresh_at]).min();
            }
        }
        found
    }

    /// A token, and when to request it again.
    async fn token(&self, key: &TokenKey) -> (Result<String, String>, Instant) {
        let now = Instant::now();
        let cached = self.tokens.lock().unwrap().get(key).cloned();
        if let Some(token) = cached.as_ref().filter(|token| now < token.renew) {
            return (Ok(token.text.clone()), token.renew);
        }
        match (self.request(key).await, cached) {
            (Ok(token), _) => {
                self.tokens
                    .lock()
                    .unwrap()
                    .insert(key.clone(), token.clone());
                (Ok(token.text), token.renew)
            }
            (Err(error), Some(token)) if Instant::now() < token.expires => {
                tracing::warn!(
                    pod = %format_args!("{}/{}", key.namespace, key.pod),
                    error = &error as &dyn std::error::Error,
                    "cannot renew service account token"
                );
                (Ok(token.text), now + RENEW_RETRY_INTERVAL)
            }
            (Err(error), _) => (Err(error.to_string()), now + OBJECT_RETRY_INTERVAL),
        }
    }

    async fn request(&self, key: &TokenKey) -> Result<Token, ApiCallError> {
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
        let create = || accounts.create_token_request(&key.account, &parameters, &request);
        let response = call_for_bound_pod(create).await?;
        Ok(token(&response))
    }

    /// Drops the tokens of a pod.
    pub(super) fn forget(&self, uid: &str) {
        self.tokens.lock().unwrap().retain(|key, _| key.uid != uid);
    }
}

fn key(pod: &Pod, projection: &ServiceAccountTokenProjection) -> TokenKey {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let account = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.service_account_name.clone());
    TokenKey {
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

/// Converts a response, with times on this machine's clock.
fn token(response: &TokenRequest) -> Token {
    let status = response.status.clone().unwrap_or_default();
    // As in upstream, the token's age is computed from its lifetime and its expiration time.
    let spec = response.spec.as_ref();
    let granted = spec
        .and_then(|spec| spec.expiration_seconds)
        .unwrap_or(3600);
    let end = status.expiration_timestamp;
    let left = end.map_or(granted, |end| {
        end.0.as_second() - Timestamp::now().as_second()
    });
    let now = Instant::now();
    let jitter = Duration::from_millis(random_u64() % JITTER_MILLIS);
    let renew_in = renew_in(granted, left).saturating_sub(jitter);
    Token {
        text: status.token.unwrap_or_default(),
        expires: now + seconds(left),
        // Never request a token in a busy loop, however short its lifetime.
        renew: now + renew_in.max(Duration::from_secs(1)),
    }
}

/// The time until the renewal of a token with a lifetime of `granted` seconds, of which `left` seconds remain. It is renewed when
/// a fifth of its lifetime remains, or at [`MAX_TOKEN_AGE`].
fn renew_in(granted: i64, left: i64) -> Duration {
    let until_fifth = left - granted * 20 / 100;
    let age = granted - left;
    let until_max_age = i64::try_from(MAX_TOKEN_AGE.as_secs()).unwrap_or(i64::MAX) - age;
    seconds(until_fifth.min(until_max_age))
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or_default())
}

pub(super) fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    // On error the number is 0: then renewals are not spread.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_time_follows_upstream() {
        // An hour, just granted; half an hour later; ten minutes; a year; a year, granted 23 hours ago; overdue.
        let cases = [
            (3600, 3600),
            (3600, 1800),
            (600, 600),
            (31_536_000, 31_536_000),
            (31_536_000, 31_453_200),
            (600, 30),
        ];
        let delays = cases.map(|(granted, left)| renew_in(granted, left).as_secs());
        assert_eq!(delays, [2880, 1080, 480, 86_400, 3600, 0]);
    }
}
