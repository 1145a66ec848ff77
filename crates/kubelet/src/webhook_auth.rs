//! Webhook authentication and authorization of the kubelet's HTTPS API: the API server decides, by TokenReview and
//! SubjectAccessReview. Upstream's Node authorizer lets nodes create both.

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use kubelet_api::{AccessRequest, AuthenticatedUser, DelegatedAuth, DelegatedAuthError};

use crate::api_call::call;

/// Asks the API server about clients of one node's kubelet.
pub struct WebhookAuth {
    client: Client,
    node: String,
}

impl WebhookAuth {
    /// Authenticates and authorizes clients of the node of this name.
    pub fn new(client: Client, node: impl Into<String>) -> Self {
        let node = node.into();
        Self { client, node }
    }
}

impl DelegatedAuth for WebhookAuth {
    fn authenticate(
        &self,
        token: &str,
    ) -> BoxFuture<'static, Result<Option<AuthenticatedUser>, DelegatedAuthError>> {
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                ..TokenReviewSpec::default()
            },
            ..TokenReview::default()
        };
        async move {
            let reviewed = call(reviews.create(&PostParams::default(), &review)).await?;
            Ok(user(reviewed))
        }
        .boxed()
    }

    fn authorize(
        &self,
        request: &AccessRequest,
    ) -> BoxFuture<'static, Result<bool, DelegatedAuthError>> {
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let review = access_review(request, &self.node);
        async move {
            let reviewed = call(reviews.create(&PostParams::default(), &review)).await?;
            Ok(reviewed.status.is_some_and(|status| status.allowed))
        }
        .boxed()
    }
}

/// The user that the API server found for a token.
fn user(review: TokenReview) -> Option<AuthenticatedUser> {
    let status = review.status?;
    if status.authenticated != Some(true) {
        return None;
    }
    let UserInfo {
        username,
        uid,
        groups,
        extra,
    } = status.user?;
    let name = username.filter(|name| !name.is_empty())?;
    Some(AuthenticatedUser {
        name,
        uid: uid.unwrap_or_default(),
        groups: groups.unwrap_or_default(),
        extra: extra.unwrap_or_default(),
    })
}

fn access_review(request: &AccessRequest, node: &str) -> SubjectAccessReview {
    let AccessRequest {
        user,
        verb,
        subresource,
    } = request;
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            uid: (!user.uid.is_empty()).then(|| user.uid.clone()),
            groups: Some(user.groups.clone()),
            extra: Some(user.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                verb: Some((*verb).to_owned()),
                version: Some("v1".to_owned()),
                resource: Some("nodes".to_owned()),
                subresource: Some((*subresource).to_owned()),
                name: Some(node.to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_authenticated_review_yields_user() {
        let read = |status| {
            let review = json!({ "spec": { "token": "t" }, "status": status });
            user(serde_json::from_value(review).unwrap())
        };
        let known = json!({ "authenticated": true,
            "user": { "username": "system:serviceaccount:a:b", "uid": "1", "groups": ["system:serviceaccounts"] } });
        assert_eq!(read(known).unwrap().name, "system:serviceaccount:a:b");
        let unsure = json!({ "user": { "username": "system:serviceaccount:a:b" } });
        assert_eq!(read(unsure), None);
        assert_eq!(read(json!({ "authenticated": true })), None);
        assert_eq!(
            read(json!({ "authenticated": true, "user": { "username": "" } })),
            None
        );
    }

    #[test]
    fn access_review_names_this_node() {
        let request = AccessRequest {
            user: AuthenticatedUser {
                name: "me".to_owned(),
                ..AuthenticatedUser::default()
            },
            verb: "get",
            subresource: "stats",
        };
        let review = serde_json::to_value(access_review(&request, "node1")).unwrap();
        let expected = json!({ "verb": "get", "version": "v1", "resource": "nodes", "subresource": "stats", "name": "node1" });
        assert_eq!(review["spec"]["resourceAttributes"], expected);
        assert_eq!(review["spec"]["user"], "me");
    }
}
