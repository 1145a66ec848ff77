//! Downloads a file. Hashes it while it arrives, and resumes it after a broken connection, also in a later run.

use std::error::Error;
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, ETAG, IF_RANGE, RANGE};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};

use crate::error::FetchError;
use crate::part::{Digest, Part, hex};
use console::FileProgress;

/// Limit on consecutive retries without progress.
const RETRIES: u32 = 4;

/// Delay before the first retry; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// An attempt that received this much counts as progress.
const SOMEWHERE: u64 = 1 << 20;

/// Limit on the size of a file; those of releases are far smaller.
const LARGEST_FILE: u64 = 2 << 30;

/// Limit on the size of a list of checksums.
const LARGEST_TEXT: usize = 1 << 20;

/// A file on a server.
#[derive(Debug, Clone)]
pub struct Source {
    /// Kubernetes or etcd.
    pub product: &'static str,
    /// The version it belongs to.
    pub version: String,
    /// Its URL.
    pub url: Url,
}

/// A failed attempt.
enum Trouble {
    /// A retry may succeed.
    Passing {
        source: Box<dyn Error + Send + Sync>,
        connected: bool,
    },
    /// A retry is pointless.
    Lasting(FetchError),
}

impl<E: Into<FetchError>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Lasting(error.into())
    }
}

/// The HTTP client for all downloads of a run.
pub fn client() -> Result<Client, FetchError> {
    let redirects = reqwest::redirect::Policy::custom(|attempt| {
        let secure = attempt.previous().iter().any(|url| url.scheme() == "https");
        if attempt.previous().len() > 10 {
            attempt.error("redirected more than ten times")
        } else if secure && attempt.url().scheme() != "https" {
            attempt.error("redirected to a connection that is not secure")
        } else {
            attempt.follow()
        }
    });
    Client::builder()
        .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
        .redirect(redirects)
        .connect_timeout(Duration::from_secs(15))
        // Time-out of each read: a silent server counts as a broken connection.
        .read_timeout(Duration::from_secs(30))
        .build()
        .map_err(FetchError::Client)
}

/// Downloads a small text, such as a list of checksums.
pub async fn text(client: &Client, source: &Source) -> Result<String, FetchError> {
    let mut patience = Patience::new(source);
    loop {
        match try_text(client, source).await {
            Ok(text) => return Ok(text),
            Err(trouble) => patience.pause(trouble, |_| {}).await?,
        }
    }
}

async fn try_text(client: &Client, source: &Source) -> Result<String, Trouble> {
    let mut response = send(source, client.get(source.url.clone())).await?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(passing)? {
        body.extend_from_slice(&chunk);
        if body.len() > LARGEST_TEXT {
            return Err(FetchError::TooLarge {
                url: shown(&source.url),
            }
            .into());
        }
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

/// Downloads `source` into `part` until it is complete and its digest is `expected`.
pub async fn download(
    client: &Client,
    source: &Source,
    expected: &Digest,
    part: &mut Part,
    mut progress: FileProgress,
) -> Result<(), FetchError> {
    let mut patience = Patience::new(source);
    let mut again = true;
    loop {
        let before = part.len();
        match attempt(client, source, expected, part, &mut progress).await {
            Ok(()) if part.digest() == *expected => {
                progress.finish(part.len());
                return Ok(());
            }
            Ok(()) => {
                let got = part.digest();
                let pieced = part.pieced();
                part.restart(None).await?;
                if !(pieced && again) {
                    part.remove();
                    return Err(FetchError::Checksum {
                        file: part.name().to_owned(),
                        url: shown(&source.url),
                        expected: hex(expected),
                        got: hex(&got),
                    });
                }
                // The parts may come from different files: the server's file changed, or the disk lost data.
                again = false;
                progress.note("the resumed file is not what it should be; starting over");
            }
            Err(trouble) => {
                // Save the received bytes for the next attempt or run.
                part.flush().await?;
                if part.len() >= before + SOMEWHERE {
                    patience = Patience::new(source);
                }
                patience.pause(trouble, |text| progress.note(text)).await?;
            }
        }
    }
}

/// Requests the bytes that `part` lacks.
async fn attempt(
    client: &Client,
    source: &Source,
    expected: &Digest,
    part: &mut Part,
    progress: &mut FileProgress,
) -> Result<(), Trouble> {
    if part.len() > 0 && part.digest() == *expected {
        return Ok(());
    }
    let mut request = client.get(source.url.clone());
    if part.len() > 0 {
        request = request.header(RANGE, format!("bytes={}-", part.len()));
        if let Some(etag) = part.etag() {
            request = request.header(IF_RANGE, etag);
        }
    }
    let mut response = send(source, request).await?;
    match response.status() {
        StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(part.len()) => part.resume(),
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            part.restart(None).await?;
            return Err(Trouble::Passing {
                source: "the server sent another range".into(),
                connected: true,
            });
        }
        _ => part.restart(strong_etag(&response)).await?,
    }
    let total = response.content_length().map(|rest| part.len() + rest);
    let too_large = || FetchError::TooLarge {
        url: shown(&source.url),
    };
    if total.is_some_and(|total| total > LARGEST_FILE) {
        return Err(too_large().into());
    }
    progress.begin(part.len(), total);
    part.expect(total);
    while let Some(chunk) = response.chunk().await.map_err(passing)? {
        part.append(&chunk).await?;
        progress.advance(part.len());
        if part.len() > LARGEST_FILE {
            return Err(too_large().into());
        }
    }
    part.flush().await?;
    Ok(())
}

async fn send(source: &Source, request: RequestBuilder) -> Result<Response, Trouble> {
    let response = request.send().await.map_err(passing)?;
    let status = response.status();
    let url = || shown(&source.url);
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => Err(FetchError::NoSuchVersion {
            product: source.product,
            version: source.version.clone(),
            url: url(),
        }
        .into()),
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Err(answered(status)),
        status if status.is_server_error() => Err(answered(status)),
        StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            Ok(response)
        }
        status => Err(FetchError::Status { url: url(), status }.into()),
    }
}

fn answered(status: StatusCode) -> Trouble {
    Trouble::Passing {
        source: format!("the server answered {status}").into(),
        connected: true,
    }
}

fn passing(error: reqwest::Error) -> Trouble {
    let connected = !error.is_connect();
    // Drop the URL, which may contain a mirror's password. The error message adds it without the password.
    Trouble::Passing {
        source: Box::new(error.without_url()),
        connected,
    }
}

/// The first byte position of the `Content-Range` header: `bytes 100-199/200`.
fn range_start(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range
        .strip_prefix("bytes ")?
        .split_once('-')?
        .0
        .parse()
        .ok()
}

/// The ETag, unless it is weak: a weak one does not promise the same bytes, and `If-Range` must not use it.
fn strong_etag(response: &Response) -> Option<String> {
    let etag = response.headers().get(ETAG)?.to_str().ok()?;
    (!etag.starts_with("W/")).then(|| etag.to_owned())
}

/// The URL without user name and password.
pub fn shown(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.into()
}

/// Counts failures and decides whether to retry.
struct Patience<'a> {
    source: &'a Source,
    failures: u32,
}

impl<'a> Patience<'a> {
    fn new(source: &'a Source) -> Self {
        Patience {
            source,
            failures: 0,
        }
    }

    /// Waits before the next attempt, or returns the final error.
    async fn pause(&mut self, trouble: Trouble, note: impl FnOnce(&str)) -> Result<(), FetchError> {
        let (source, connected) = match trouble {
            Trouble::Passing { source, connected } => (source, connected),
            Trouble::Lasting(error) => return Err(error),
        };
        self.failures += 1;
        let (url, tries) = (shown(&self.source.url), self.failures);
        if self.failures > RETRIES {
            return Err(match connected {
                true => FetchError::Broken { url, tries, source },
                false => FetchError::Unreachable { url, tries, source },
            });
        }
        let pause = FIRST_PAUSE * (1 << (self.failures - 1));
        note(&format!(
            "{}; trying again in {:.1} s",
            images::error_chain(&*source),
            pause.as_secs_f64()
        ));
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_of_a_mirror_are_not_shown() {
        let url = Url::parse("https://user:secret@mirror.example/k8s/x").unwrap();
        assert_eq!(shown(&url), "https://mirror.example/k8s/x");
    }
}
