//! Delegated authentication and authorization: the API server decides about clients without an allowed certificate.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use futures::future::BoxFuture;

use super::cache::Cache;

/// A user, as TokenReview describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct AuthenticatedUser {
    /// The user name.
    pub name: String,
    /// The user's uid, or empty.
    pub uid: String,
    /// The user's groups.
    pub groups: Vec<String>,
    /// Additional attributes from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The content of a SubjectAccessReview: a user, and an action on this node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AccessRequest {
    /// The caller.
    pub user: AuthenticatedUser,
    /// The API's verb: `get`, `create`, …
    pub verb: &'static str,
    /// The subresource of the Node: `proxy`, `stats`, `metrics`, …
    pub subresource: &'static str,
}

/// TokenReview and SubjectAccessReview of the API server. The caller caches the results.
pub trait DelegatedAuth: Send + Sync {
    /// The owner of a token; `None` if the token is not valid.
    fn authenticate(
        &self,
        token: &str,
    ) -> BoxFuture<'static, Result<Option<AuthenticatedUser>, DelegatedAuthError>>;

    /// Whether RBAC allows the request.
    fn authorize(
        &self,
        request: &AccessRequest,
    ) -> BoxFuture<'static, Result<bool, DelegatedAuthError>>;
}

/// Why the API server could not decide.
pub type DelegatedAuthError = Box<dyn Error + Send + Sync>;

/// The TTLs are the defaults of upstream's kubelet.
const TOKEN_TTL: Duration = Duration::from_secs(2 * 60);
const ALLOWED_TTL: Duration = Duration::from_secs(5 * 60);
const DENIED_TTL: Duration = Duration::from_secs(30);

/// A [`DelegatedAuth`] with caches.
pub(super) struct CachedAuth {
    delegated: Arc<dyn DelegatedAuth>,
    /// Keyed by the token's digest, since the token itself is a secret.
    tokens: Cache<Vec<u8>, Option<AuthenticatedUser>>,
    decisions: Cache<AccessRequest, bool>,
}

impl CachedAuth {
    pub(super) fn new(delegated: Arc<dyn DelegatedAuth>) -> Self {
        Self {
            delegated,
            tokens: Cache::new(),
            decisions: Cache::new(),
        }
    }

    pub(super) async fn authenticate(
        &self,
        token: &str,
    ) -> Result<Option<AuthenticatedUser>, DelegatedAuthError> {
        let key = digest(&SHA256, token.as_bytes()).as_ref().to_vec();
        if let Some(user) = self.tokens.get(&key) {
            return Ok(user);
        }
        let user = self.delegated.authenticate(token).await?;
        self.tokens.put(key, user.clone(), TOKEN_TTL);
        Ok(user)
    }

    pub(super) async fn authorize(
        &self,
        request: AccessRequest,
    ) -> Result<bool, DelegatedAuthError> {
        if let Some(allowed) = self.decisions.get(&request) {
            return Ok(allowed);
        }
        let allowed = self.delegated.authorize(&request).await?;
        let ttl = if allowed { ALLOWED_TTL } else { DENIED_TTL };
        self.decisions.put(request, allowed, ttl);
        Ok(allowed)
    }
}
