//! Who decides about callers that are not on the allow-list: the API server, through the kubelet.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use futures::future::BoxFuture;

use super::cache::Cache;

/// A user, as the API server knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct User {
    /// The name.
    pub name: String,
    /// The API server's id of it, if there is one.
    pub uid: String,
    /// The groups that it is in.
    pub groups: Vec<String>,
    /// What else was said when the user showed its token.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// May this user do this to this node?
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Question {
    /// Who.
    pub user: User,
    /// The API's verb: `get`, `create`, …
    pub verb: &'static str,
    /// The subresource of the Node: `proxy`, `stats`, `metrics`, …
    pub subresource: &'static str,
}

/// The API server's judgement: TokenReview and SubjectAccessReview. Answers are kept here, so it is asked rarely.
pub trait Authority: Send + Sync {
    /// Whose token this is; `None` if nobody's.
    fn authenticate(&self, token: &str) -> BoxFuture<'static, Result<Option<User>, NoJudgement>>;

    /// Whether RBAC allows it.
    fn authorise(&self, question: &Question) -> BoxFuture<'static, Result<bool, NoJudgement>>;
}

/// Why nobody could judge.
pub type NoJudgement = Box<dyn Error + Send + Sync>;

/// The TTLs are the defaults of upstream's kubelet.
const TOKEN_TTL: Duration = Duration::from_secs(2 * 60);
const ALLOWED_TTL: Duration = Duration::from_secs(5 * 60);
const DENIED_TTL: Duration = Duration::from_secs(30);

/// An authority whose answers are kept.
pub(super) struct Remembering {
    authority: Arc<dyn Authority>,
    /// By the token's digest, for the token itself is a secret.
    tokens: Cache<Vec<u8>, Option<User>>,
    answers: Cache<Question, bool>,
}

impl Remembering {
    pub(super) fn new(authority: Arc<dyn Authority>) -> Self {
        Self {
            authority,
            tokens: Cache::new(),
            answers: Cache::new(),
        }
    }

    pub(super) async fn authenticate(&self, token: &str) -> Result<Option<User>, NoJudgement> {
        let key = digest(&SHA256, token.as_bytes()).as_ref().to_vec();
        if let Some(user) = self.tokens.get(&key) {
            return Ok(user);
        }
        let user = self.authority.authenticate(token).await?;
        self.tokens.put(key, user.clone(), TOKEN_TTL);
        Ok(user)
    }

    pub(super) async fn authorise(&self, question: Question) -> Result<bool, NoJudgement> {
        if let Some(allowed) = self.answers.get(&question) {
            return Ok(allowed);
        }
        let allowed = self.authority.authorise(&question).await?;
        let ttl = if allowed { ALLOWED_TTL } else { DENIED_TTL };
        self.answers.put(question, allowed, ttl);
        Ok(allowed)
    }
}
