//! HTTP clients for registries and token servers.

use std::error::Error;
use std::fs;
use std::path::Path;

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder, Response};
use serde::Deserialize;

use super::config::{RegistryEndpoint, TokenServer};
use super::error::RegistryError;

/// Size limit for error messages and token responses, in bytes.
const MAX_SMALL_BODY: usize = 1 << 20;

/// A client for one endpoint. It follows redirects, because registries redirect blob requests.
pub fn client(endpoint: &RegistryEndpoint) -> Result<Client, RegistryError> {
    let builder = download::client_builder();
    build(builder, endpoint.verified, endpoint.ca.as_deref())
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
    let builder = download::client_builder().redirect(redirects);
    build(builder, server.verified, server.ca.as_deref())
}

fn build(
    mut builder: ClientBuilder,
    verified: bool,
    ca: Option<&Path>,
) -> Result<Client, RegistryError> {
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

/// The body of a response that should be small; empty on error.
pub async fn small_body(response: Response) -> Vec<u8> {
    let body = download::body(response, MAX_SMALL_BODY).await;
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
