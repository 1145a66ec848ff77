//! HTTP clients, as each place needs them.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, Response};
use serde::Deserialize;

use super::config::{Place, TokenServer};
use super::error::RegistryError;

/// Explanations of errors and tokens are small.
const LARGEST_ANSWER: usize = 1 << 20;

/// A client for one place. Registries send clients elsewhere for blobs; reqwest takes the `Authorization` header along only
/// within one scheme, host and port.
pub fn client(place: &Place) -> Result<Client, RegistryError> {
    let redirects = Policy::custom(|attempt| {
        let secure = attempt.previous().iter().any(|url| url.scheme() == "https");
        if attempt.previous().len() > 10 {
            attempt.error("redirected more than ten times")
        } else if secure && attempt.url().scheme() != "https" {
            attempt.error("redirected to a connection that is not secure")
        } else {
            attempt.follow()
        }
    });
    build(redirects, place.verified, place.ca.as_deref())
}

/// A client for a token server. It may not send us elsewhere: the body of a request, which holds a secret too, would go along.
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
        // Of each read: a server that falls silent counts as a broken connection.
        .read_timeout(Duration::from_secs(30));
    if !verified {
        builder = builder.tls_danger_accept_invalid_certs(true);
    }
    if let Some(path) = ca {
        let unusable = |source: Box<dyn Error + Send + Sync>| RegistryError::Authority {
            file: path.display().to_string(),
            source,
        };
        let pem = fs::read(path).map_err(|e| unusable(e.into()))?;
        let authorities = Certificate::from_pem_bundle(&pem).map_err(|e| unusable(e.into()))?;
        builder = builder.tls_certs_merge(authorities);
    }
    builder.build().map_err(RegistryError::Client)
}

/// A small body; `None` if it is larger than `most`.
pub async fn body(mut response: Response, most: usize) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() > most {
            return Ok(None);
        }
    }
    Ok(Some(body))
}

/// The body of an answer that should be small; empty if it can't be had.
pub async fn small_body(response: Response) -> Vec<u8> {
    let body = body(response, LARGEST_ANSWER).await;
    body.ok().flatten().unwrap_or_default()
}

/// A registry's own words in an answer that refuses, made fit for a status.
pub async fn words(response: Response) -> String {
    #[derive(Deserialize)]
    struct Answer {
        errors: Vec<Words>,
    }
    #[derive(Deserialize)]
    struct Words {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let body = small_body(response).await;
    let Ok(answer) = serde_json::from_slice::<Answer>(&body) else {
        return String::new();
    };
    let said: Vec<_> = answer
        .errors
        .iter()
        .take(3)
        .map(|error| match error.message.as_str() {
            "" => error.code.to_lowercase(),
            message => message.to_owned(),
        })
        .collect();
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    said.join("; ").chars().map(printable).take(300).collect()
}
