//! Authentication and authorization: the API server presents a certificate of a CA that signs nothing else; every other client presents a token,
//! and RBAC decides. Certificates of other CAs fail in the TLS handshake (`tls.rs`).
//!
//! `attributes.rs` maps a request to the RBAC permission that it needs, `delegated.rs` asks the API server, `cache.rs` keeps its decisions.

mod attributes;
mod cache;
mod delegated;

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::sync::Notify;

use self::delegated::CachedAuth;

pub use delegated::{AccessRequest, AuthenticatedUser, DelegatedAuth, DelegatedAuthError};

/// Which clients may call the kubelet's API.
pub struct AccessPolicy {
    allowed: BTreeSet<String>,
    delegated: Option<CachedAuth>,
}

impl AccessPolicy {
    /// Allows only clients whose certificates have one of these common names.
    pub fn for_common_names(common_names: impl IntoIterator<Item = String>) -> Self {
        Self {
            allowed: common_names.into_iter().collect(),
            delegated: None,
        }
    }

    /// Also allows clients with a token, if `delegated` authenticates and authorizes them.
    pub fn with_delegated_auth(mut self, delegated: Arc<dyn DelegatedAuth>) -> Self {
        self.delegated = Some(CachedAuth::new(delegated));
        self
    }

    /// Whether clients without a certificate can authenticate.
    pub(crate) fn accepts_tokens(&self) -> bool {
        self.delegated.is_some()
    }

    /// Whether the owner of a certificate with this common name may call every endpoint.
    pub(crate) fn allows_common_name(&self, common_name: &str) -> bool {
        self.allowed.contains(common_name)
    }
}

/// The result of a client's TLS handshake.
#[derive(Clone, Debug)]
pub(crate) enum CallerIdentity {
    /// A certificate with an allowed common name.
    AllowedCertificate,
    /// No such certificate: each request needs a token. The first allowed request notifies `authenticated`.
    Unverified { authenticated: Arc<Notify> },
}

/// Why a request is rejected; the messages are upstream's.
#[derive(Debug, thiserror::Error)]
enum AuthRejection {
    #[error("Unauthorized")]
    Unauthenticated,
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
    Unavailable {
        user: String,
        verb: &'static str,
        subresource: &'static str,
    },
}

impl IntoResponse for AuthRejection {
    fn into_response(self) -> Response {
        let code = match self {
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::Unavailable { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (code, self.to_string()).into_response()
    }
}

/// Middleware: passes a request on only if its client is authorized for it.
pub(crate) async fn authorize_request(
    State(access): State<Arc<AccessPolicy>>,
    Extension(caller): Extension<CallerIdentity>,
    request: Request,
    next: Next,
) -> Response {
    let CallerIdentity::Unverified { authenticated } = caller else {
        return next.run(request).await;
    };
    // Only the head is needed here; the body is not Sync and must not be held across an await.
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let verb = attributes::verb(&parts.method, path);
    match authorize_token(&access, &parts.headers, verb, path).await {
        Ok(()) => {
            authenticated.notify_one();
            next.run(Request::from_parts(parts, body)).await
        }
        Err(rejection) => {
            let reason = rejection.to_string();
            let reason = reason.trim_end();
            match rejection {
                // Debug level: any host on the network can cause this.
                AuthRejection::Unauthenticated => {
                    tracing::debug!(path, reason, "rejected kubelet API request");
                }
                _ => tracing::warn!(path, reason, "rejected kubelet API request"),
            }
            rejection.into_response()
        }
    }
}

/// Decides about a request with a bearer token, or without any.
async fn authorize_token(
    access: &AccessPolicy,
    headers: &HeaderMap,
    verb: &'static str,
    path: &str,
) -> Result<(), AuthRejection> {
    let (Some(delegated), Some(token)) = (&access.delegated, bearer_token(headers)) else {
        return Err(AuthRejection::Unauthenticated);
    };
    let user = authenticate_token(delegated, token).await?;
    let subresources = attributes::subresources(path);
    for subresource in subresources {
        let request = AccessRequest {
            user: user.clone(),
            verb,
            subresource,
        };
        let allowed = delegated.authorize(request).await.map_err(|error| {
            tracing::warn!(%error, user = user.name, "SubjectAccessReview failed");
            AuthRejection::Unavailable {
                user: user.name.clone(),
                verb,
                subresource,
            }
        })?;
        if allowed {
            return Ok(());
        }
    }
    Err(AuthRejection::Forbidden {
        user: user.name,
        verb,
        subresources: subresources.join(" "),
    })
}

async fn authenticate_token(
    delegated: &CachedAuth,
    token: &str,
) -> Result<AuthenticatedUser, AuthRejection> {
    match delegated.authenticate(token).await {
        Ok(Some(user)) => Ok(user),
        Ok(None) => Err(AuthRejection::Unauthenticated),
        Err(error) => {
            tracing::warn!(%error, "TokenReview failed");
            Err(AuthRejection::Unauthenticated)
        }
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
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

    /// Authenticates two tokens and allows reading metrics; authorization fails for the user "unlucky".
    #[derive(Default)]
    struct FakeAuth {
        calls: AtomicUsize,
    }

    impl DelegatedAuth for FakeAuth {
        fn authenticate(
            &self,
            token: &str,
        ) -> BoxFuture<'static, Result<Option<AuthenticatedUser>, DelegatedAuthError>> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            let name = match token {
                "good" => Some("reader"),
                "unlucky" => Some("unlucky"),
                _ => None,
            };
            let user = name.map(|name| AuthenticatedUser {
                name: name.to_owned(),
                ..AuthenticatedUser::default()
            });
            async { Ok(user) }.boxed()
        }

        fn authorize(
            &self,
            request: &AccessRequest,
        ) -> BoxFuture<'static, Result<bool, DelegatedAuthError>> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            if request.user.name == "unlucky" {
                return async { Err("down".into()) }.boxed();
            }
            let allowed = request.verb == "get" && request.subresource == "metrics";
            async move { Ok(allowed) }.boxed()
        }
    }

    fn with_token(token: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::try_from(format!("Bearer {token}")).unwrap();
        headers.insert(header::AUTHORIZATION, value);
        headers
    }

    async fn authorize_get(
        access: &AccessPolicy,
        headers: &HeaderMap,
        path: &str,
    ) -> Result<(), String> {
        let result = authorize_token(access, headers, "get", path).await;
        result.map_err(|rejection| rejection.to_string())
    }

    #[tokio::test]
    async fn rbac_decisions_about_tokens_are_cached() {
        let delegated = Arc::new(FakeAuth::default());
        let access = AccessPolicy::for_common_names([])
            .with_delegated_auth(Arc::clone(&delegated) as Arc<dyn DelegatedAuth>);
        for _ in 0..2 {
            let good = with_token("good");
            assert_eq!(
                authorize_get(&access, &good, "/metrics/resource").await,
                Ok(())
            );
        }
        assert_eq!(delegated.calls.load(Ordering::SeqCst), 2);
        assert_eq!(
            authorize_get(&access, &with_token("good"), "/pods").await,
            Err(
                "Forbidden (user=reader, verb=get, resource=nodes, subresource(s)=[pods proxy])\n"
                    .to_owned()
            )
        );
        assert_eq!(
            authorize_get(&access, &with_token("unlucky"), "/exec/a/b/c").await,
            Err(
                "Authorization error (user=unlucky, verb=get, resource=nodes, subresource=proxy)"
                    .to_owned()
            )
        );
        let unauthorized = Err("Unauthorized".to_owned());
        for headers in [with_token("bad"), HeaderMap::new()] {
            assert_eq!(
                authorize_get(&access, &headers, "/metrics").await,
                unauthorized
            );
        }
    }

    #[tokio::test]
    async fn without_delegated_auth_tokens_are_rejected() {
        let access = AccessPolicy::for_common_names(["api".to_owned()]);
        assert!(access.allows_common_name("api"));
        assert!(!access.allows_common_name("me"));
        let headers = with_token("good");
        assert!(authorize_get(&access, &headers, "/metrics").await.is_err());
    }
}
