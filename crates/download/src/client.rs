//! The HTTP client for downloads.

use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Response};

/// An HTTP client with time-outs, which follows redirects. reqwest sends credentials only to the same scheme, host and port.
pub fn client_builder() -> ClientBuilder {
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
    Client::builder()
        .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
        .redirect(redirects)
        // The URL that redirects may contain a token.
        .referer(false)
        .connect_timeout(Duration::from_secs(15))
        // Per read: a silent server counts as a lost connection.
        .read_timeout(Duration::from_secs(30))
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
