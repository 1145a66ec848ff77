//! Who may call the kubelet's HTTPS API, judged by the API server: TokenReview and SubjectAccessReview, which upstream's Node
//! authorizer lets nodes create.

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use kubelet_api::{AccessRequest, AuthenticatedUser, DelegatedAuth, DelegatedAuthError};

use crate::api::call;

/// The API server's judgement about callers of one node.
pub struct ApiAuthority {
    client: Client,
    node: String,
}

impl ApiAuthority {
    /// Judges callers of the node of this name.
    pub fn new(client: Client, node: impl Into<String>) -> Self {
        let node = node.into();
        Self { client, node }
    }
}

impl DelegatedAuth for ApiAuthority {
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
        question: &AccessRequest,
    ) -> BoxFuture<'static, Result<bool, DelegatedAuthError>> {
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let review = access_review(question, &self.node);
        async move {
            let reviewed = call(reviews.create(&PostParams::default(), &review)).await?;
            Ok(reviewed.status.is_some_and(|status| status.allowed))
        }
        .boxed()
    }
}

/// Whom the API server knows by a token, if anybody.
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

fn access_review(question: &AccessRequest, node: &str) -> SubjectAccessReview {
    let AccessRequest {
        user,
        verb,
        subresource,
    } = question;
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
    fn only_a_token_that_was_recognised_is_somebodys() {
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
    fn the_question_is_about_this_node() {
        let question = AccessRequest {
            user: AuthenticatedUser {
                name: "me".to_owned(),
                ..AuthenticatedUser::default()
            },
            verb: "get",
            subresource: "stats",
        };
        let review = serde_json::to_value(access_review(&question, "node1")).unwrap();
        let expected = json!({ "verb": "get", "version": "v1", "resource": "nodes", "subresource": "stats", "name": "node1" });
        assert_eq!(review["spec"]["resourceAttributes"], expected);
        assert_eq!(review["spec"]["user"], "me");
    }
}
