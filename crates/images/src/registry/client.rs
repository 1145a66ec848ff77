//! HTTP clients for registries and token servers.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, Response};
use serde::Deserialize;

use super::config::{RegistryEndpoint, TokenServer};
use super::error::RegistryError;

/// The largest error message or token response.
const MAX_SMALL_BODY: usize = 1 << 20;

/// A client for one endpoint. Registries redirect blob requests; reqwest sends the `Authorization` header only to the same
/// scheme, host and port.
pub fn client(endpoint: &RegistryEndpoint) -> Result<Client, RegistryError> {
    let redirects = Policy::custom(|attempt| {
        let secure = attempt.previous().iter().any(|url| url.scheme() == "https");
        if attempt.previous().len() > 10 {
            attempt.error("redirected more than ten times")
        } else if secure && attempt.url().scheme() != "https" {
            attempt.error("redirected from https to an insecure URL")
        } else {
            attempt.follow()
        }
    });
    build(redirects, endpoint.verified, endpoint.ca.as_deref())
}

/// A client for a token server. It follows no redirect to another server, because the body of a request may hold a secret.
pub fn token_client(server: &TokenServer) -> Result<Client, RegistryError> {
    let redirects = Policy::custom(|attempt| {
        let first = attempt.previous().first();
        if attempt.previous().len() > 10 {
            attempt.error("redirected more than ten times")
        } else if first.is_none_or(|first| first.origin() != attempt.url().origin()) {
            attempt.error("the token server redirects to another server, which gets no credentials")
        } else {
            attempt.follow()
        }
    });
    build(redirects, server.verified, server.ca.as_deref())
}

fn build(redirects: Policy, verified: bool, ca: Option<&Path>) -> Result<Client, RegistryError> {
    let mut builder = Client::builder()
        .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
        .redirect(redirects)
        .connect_timeout(Duration::from_secs(15))
        // Per read: a silent server counts as a lost connection.
        .read_timeout(Duration::from_secs(30));
    if !verified {
        builder = builder.tls_danger_accept_invalid_certs(true);
    }
    if let Some(path) = ca {
        let unusable = |source: Box<dyn Error + Send + Sync>| RegistryError::CaFile {
            file: path.display().to_string(),
            source,
        };
        let pem = fs::read(path).map_err(|e| unusable(e.into()))?;
        let authorities = Certificate::from_pem_bundle(&pem).map_err(|e| unusable(e.into()))?;
        builder = builder.tls_certs_merge(authorities);
    }
    builder.build().map_err(RegistryError::Client)
}

/// A small body; `None` if it is larger than `limit`.
pub async fn body(mut response: Response, limit: usize) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() > limit {
            return Ok(None);
        }
    }
    Ok(Some(body))
}

/// The body of a response that should be small; empty on error.
pub async fn small_body(response: Response) -> Vec<u8> {
    let body = body(response, MAX_SMALL_BODY).await;
    body.ok().flatten().unwrap_or_default()
}

/// The error messages in a registry's response, shortened for a pod's status.
pub async fn error_message(response: Response) -> String {
    #[derive(Deserialize)]
    struct ErrorResponse {
        errors: Vec<ErrorEntry>,
    }
    #[derive(Deserialize)]
    struct ErrorEntry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let body = small_body(response).await;
    let Ok(response) = serde_json::from_slice::<ErrorResponse>(&body) else {
        return String::new();
    };
    let messages: Vec<_> = response
        .errors
        .iter()
        .take(3)
        .map(|error| match error.message.as_str() {
            "" => error.code.to_lowercase(),
            message => message.to_owned(),
        })
        .collect();
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    messages
        .join("; ")
        .chars()
        .map(printable)
        .take(300)
        .collect()
}
