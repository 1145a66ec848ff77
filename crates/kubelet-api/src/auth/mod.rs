//! Who may call: the API server by a certificate of a CA that signs nothing else; everybody else by a token, if RBAC allows
//! it. Certificates of other CAs fail in the handshake (`tls.rs`).
//!
//! `attributes.rs` says which right a request needs, `authority.rs` whom to ask about it, `cache.rs` keeps the answers.

mod attributes;
mod authority;
mod cache;

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::sync::Notify;

use self::authority::Remembering;
use crate::Peer;

pub use authority::{Authority, NoJudgement, Question, User};

/// Who may call the kubelet's API.
pub struct Access {
    allowed: BTreeSet<String>,
    authority: Option<Remembering>,
}

impl Access {
    /// Only clients whose certificates have one of these common names.
    pub fn only(common_names: impl IntoIterator<Item = String>) -> Self {
        Self {
            allowed: common_names.into_iter().collect(),
            authority: None,
        }
    }

    /// And others, with a token, whom this authority knows and allows.
    pub fn or_as_judged_by(mut self, authority: Arc<dyn Authority>) -> Self {
        self.authority = Some(Remembering::new(authority));
        self
    }

    /// Whether clients without a certificate have any way in.
    pub(crate) fn takes_tokens(&self) -> bool {
        self.authority.is_some()
    }

    /// Whether the owner of this certificate may do everything.
    pub(crate) fn is_listed(&self, peer: &Peer) -> bool {
        self.allowed.contains(&peer.common_name)
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    /// The owner of a certificate with a common name on the list.
    Listed,
    /// Somebody with nothing but a token, if that; and who is told when one of its requests is allowed.
    Stranger(Arc<Notify>),
}

/// Why a request goes no further; the words are upstream's.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("Unauthorized")]
    Unauthorised,
    #[error(
        "Forbidden (user={user}, verb={verb}, resource=nodes, subresource(s)=[{subresources}])\n"
    )]
    Forbidden {
        user: String,
        verb: &'static str,
        subresources: String,
    },
    #[error(
        "Authorization error (user={user}, verb={verb}, resource=nodes, subresource={subresource})"
    )]
    NoJudgement {
        user: String,
        verb: &'static str,
        subresource: &'static str,
    },
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let code = match self {
            Self::Unauthorised => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::NoJudgement { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (code, self.to_string()).into_response()
    }
}

/// Lets a request pass if its caller may make it: being *a* user of the cluster is not enough to read its pods.
pub(crate) async fn guard(
    State(access): State<Arc<Access>>,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    let Caller::Stranger(known) = caller else {
        return next.run(request).await;
    };
    // The request's body is no business of this, and can't be shared between threads.
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let verb = attributes::verb(&parts.method, path);
    match judge(&access, &parts.headers, verb, path).await {
        Ok(()) => {
            known.notify_one();
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => {
            let why = refusal.to_string();
            let why = why.trim_end();
            match refusal {
                // Anybody on the network can do this to us, so it is no warning.
                Refusal::Unauthorised => {
                    tracing::debug!(path, why, "refused a caller of the kubelet API");
                }
                _ => tracing::warn!(path, why, "refused a caller of the kubelet API"),
            }
            refusal.into_response()
        }
    }
}

/// Decides about a caller who shows a token, or nothing.
async fn judge(
    access: &Access,
    headers: &HeaderMap,
    verb: &'static str,
    path: &str,
) -> Result<(), Refusal> {
    let (Some(authority), Some(token)) = (&access.authority, bearer(headers)) else {
        return Err(Refusal::Unauthorised);
    };
    let user = owner(authority, token).await?;
    let subresources = attributes::subresources(path);
    for subresource in subresources {
        let question = Question {
            user: user.clone(),
            verb,
            subresource,
        };
        let judged = authority.authorise(question).await;
        let allowed = judged.map_err(|error| {
            tracing::warn!(%error, user = user.name, "could not ask whether a caller is allowed");
            Refusal::NoJudgement {
                user: user.name.clone(),
                verb,
                subresource,
            }
        })?;
        if allowed {
            return Ok(());
        }
    }
    Err(Refusal::Forbidden {
        user: user.name,
        verb,
        subresources: subresources.join(" "),
    })
}

async fn owner(authority: &Remembering, token: &str) -> Result<User, Refusal> {
    match authority.authenticate(token).await {
        Ok(Some(user)) => Ok(user),
        Ok(None) => Err(Refusal::Unauthorised),
        Err(error) => {
            tracing::warn!(%error, "could not ask whose token a caller has");
            Err(Refusal::Unauthorised)
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.trim().split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::HeaderValue;
    use futures::FutureExt;
    use futures::future::BoxFuture;

    use super::*;

    /// Knows two tokens, allows the owners to read metrics, and is down for anybody called "unlucky".
    #[derive(Default)]
    struct Judge {
        asked: AtomicUsize,
    }

    impl Authority for Judge {
        fn authenticate(
            &self,
            token: &str,
        ) -> BoxFuture<'static, Result<Option<User>, NoJudgement>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let name = match token {
                "good" => Some("reader"),
                "cursed" => Some("unlucky"),
                _ => None,
            };
            let user = name.map(|name| User {
                name: name.to_owned(),
                ..User::default()
            });
            async { Ok(user) }.boxed()
        }

        fn authorise(&self, question: &Question) -> BoxFuture<'static, Result<bool, NoJudgement>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            if question.user.name == "unlucky" {
                return async { Err("down".into()) }.boxed();
            }
            let allowed = question.verb == "get" && question.subresource == "metrics";
            async move { Ok(allowed) }.boxed()
        }
    }

    fn with_token(token: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::try_from(format!("Bearer {token}")).unwrap();
        headers.insert(header::AUTHORIZATION, value);
        headers
    }

    async fn judged(access: &Access, headers: &HeaderMap, path: &str) -> Result<(), String> {
        let judged = judge(access, headers, "get", path).await;
        judged.map_err(|refusal| refusal.to_string())
    }

    #[tokio::test]
    async fn tokens_are_judged_by_rbac_and_remembered() {
        let authority = Arc::new(Judge::default());
        let access = Access::only([]).or_as_judged_by(Arc::clone(&authority) as Arc<dyn Authority>);
        for _ in 0..2 {
            let good = with_token("good");
            assert_eq!(judged(&access, &good, "/metrics/resource").await, Ok(()));
        }
        assert_eq!(authority.asked.load(Ordering::SeqCst), 2);
        assert_eq!(
            judged(&access, &with_token("good"), "/pods").await,
            Err(
                "Forbidden (user=reader, verb=get, resource=nodes, subresource(s)=[pods proxy])\n"
                    .to_owned()
            )
        );
        assert_eq!(
            judged(&access, &with_token("cursed"), "/exec/a/b/c").await,
            Err(
                "Authorization error (user=unlucky, verb=get, resource=nodes, subresource=proxy)"
                    .to_owned()
            )
        );
        let unauthorised = Err("Unauthorized".to_owned());
        for headers in [with_token("bad"), HeaderMap::new()] {
            assert_eq!(judged(&access, &headers, "/metrics").await, unauthorised);
        }
    }

    #[tokio::test]
    async fn without_an_authority_only_the_list_counts() {
        let access = Access::only(["api".to_owned()]);
        let named = |name: &str| Peer {
            common_name: name.to_owned(),
        };
        assert!(access.is_listed(&named("api")));
        assert!(!access.is_listed(&named("me")));
        let headers = with_token("good");
        assert!(judged(&access, &headers, "/metrics").await.is_err());
    }
}
