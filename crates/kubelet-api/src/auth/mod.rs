//! Who may call: the API server by a certificate of its own CA; everybody else by a token, if RBAC allows it. Certificates of
//! other CAs fail in the handshake (`tls.rs`).
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

    /// And others, with a certificate or a token, whom this authority knows and allows.
    pub fn or_as_judged_by(mut self, authority: Arc<dyn Authority>) -> Self {
        self.authority = Some(Remembering::new(authority));
        self
    }

    /// Whether clients without a certificate have any way in.
    pub(crate) fn takes_tokens(&self) -> bool {
        self.authority.is_some()
    }
}

impl From<Vec<String>> for Access {
    fn from(common_names: Vec<String>) -> Self {
        Self::only(common_names)
    }
}

impl<const N: usize> From<[String; N]> for Access {
    fn from(common_names: [String; N]) -> Self {
        Self::only(common_names)
    }
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
    Extension(peer): Extension<Option<Peer>>,
    request: Request,
    next: Next,
) -> Response {
    // The request's body is no business of this, and can't be shared between threads.
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    match judge(
        &access,
        peer,
        &parts.headers,
        attributes::verb(&parts.method),
        path,
    )
    .await
    {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
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

async fn judge(
    access: &Access,
    peer: Option<Peer>,
    headers: &HeaderMap,
    verb: &'static str,
    path: &str,
) -> Result<(), Refusal> {
    if let Some(peer) = &peer
        && access.allowed.contains(&peer.common_name)
    {
        return Ok(());
    }
    let user = match peer {
        Some(peer) => of_certificate(peer),
        None => of_token(access, headers).await?,
    };
    let subresources = attributes::subresources(path);
    if let Some(authority) = &access.authority {
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
    }
    Err(Refusal::Forbidden {
        user: user.name,
        verb,
        subresources: subresources.join(" "),
    })
}

/// A certificate's owner is who it says, in the groups that it says, for the cluster's CA has signed it.
fn of_certificate(peer: Peer) -> User {
    let mut groups = peer.groups;
    groups.push("system:authenticated".to_owned());
    User {
        name: peer.common_name,
        groups,
        ..User::default()
    }
}

async fn of_token(access: &Access, headers: &HeaderMap) -> Result<User, Refusal> {
    let (Some(authority), Some(token)) = (&access.authority, bearer(headers)) else {
        return Err(Refusal::Unauthorised);
    };
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

    /// Knows one token, allows its owner to read metrics, and is down for anybody called "unlucky".
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
            let user = (token == "good").then(|| User {
                name: "reader".to_owned(),
                ..User::default()
            });
            async { Ok(user) }.boxed()
        }

        fn authorise(&self, question: &Question) -> BoxFuture<'static, Result<bool, NoJudgement>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            if question.user.name == "unlucky" {
                return async { Err("down".into()) }.boxed();
            }
            let allowed = question.verb == "get" && question.subresource == "metrics"
                || question.user.groups.iter().any(|group| group == "admins");
            async move { Ok(allowed) }.boxed()
        }
    }

    fn with_token(token: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::try_from(format!("Bearer {token}")).unwrap();
        headers.insert(header::AUTHORIZATION, value);
        headers
    }

    fn peer(common_name: &str, groups: &[&str]) -> Option<Peer> {
        Some(Peer {
            common_name: common_name.to_owned(),
            groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        })
    }

    async fn judged(
        access: &Access,
        peer: Option<Peer>,
        headers: &HeaderMap,
        path: &str,
    ) -> Result<(), String> {
        let judged = judge(access, peer, headers, "get", path).await;
        judged.map_err(|refusal| refusal.to_string())
    }

    #[tokio::test]
    async fn tokens_are_judged_by_rbac_and_remembered() {
        let authority = Arc::new(Judge::default());
        let access = Access::only([]).or_as_judged_by(Arc::clone(&authority) as Arc<dyn Authority>);
        for _ in 0..2 {
            let good = with_token("good");
            assert_eq!(
                judged(&access, None, &good, "/metrics/resource").await,
                Ok(())
            );
        }
        assert_eq!(authority.asked.load(Ordering::SeqCst), 2);
        assert_eq!(
            judged(&access, None, &with_token("good"), "/pods").await,
            Err(
                "Forbidden (user=reader, verb=get, resource=nodes, subresource(s)=[pods proxy])\n"
                    .to_owned()
            )
        );
        let unauthorised = Err("Unauthorized".to_owned());
        assert_eq!(
            judged(&access, None, &with_token("bad"), "/metrics").await,
            unauthorised
        );
        assert_eq!(
            judged(&access, None, &HeaderMap::new(), "/metrics").await,
            unauthorised
        );
    }

    #[tokio::test]
    async fn certificates_carry_names_and_groups() {
        let access = Access::only(["api".to_owned()]).or_as_judged_by(Arc::new(Judge::default()));
        let none = HeaderMap::new();
        assert_eq!(
            judged(&access, peer("api", &[]), &none, "/pods").await,
            Ok(())
        );
        assert_eq!(
            judged(&access, peer("me", &["admins"]), &none, "/exec/a/b/c").await,
            Ok(())
        );
        assert!(
            judged(&access, peer("me", &[]), &none, "/exec/a/b/c")
                .await
                .is_err()
        );
        assert_eq!(
            judged(&access, peer("unlucky", &[]), &none, "/exec/a/b/c").await,
            Err(
                "Authorization error (user=unlucky, verb=get, resource=nodes, subresource=proxy)"
                    .to_owned()
            )
        );
    }

    #[tokio::test]
    async fn without_an_authority_only_the_list_counts() {
        let access = Access::only(["api".to_owned()]);
        let headers = with_token("good");
        assert_eq!(
            judged(&access, peer("api", &[]), &headers, "/pods").await,
            Ok(())
        );
        assert!(
            judged(&access, peer("me", &["admins"]), &headers, "/pods")
                .await
                .is_err()
        );
        assert!(judged(&access, None, &headers, "/metrics").await.is_err());
    }
}
