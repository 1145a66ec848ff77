//! Downloads a file. Hashes it while it arrives, and resumes it after a broken connection, also in a later run.

use std::error::Error;
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, ETAG, IF_RANGE, RANGE};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};

use crate::error::FetchError;
use crate::partial_download::{PartialDownload, Sha256Digest, hex};
use console::FileProgress;

/// Limit on consecutive retries without progress.
const MAX_RETRIES: u32 = 4;

/// Delay before the first retry; it doubles with each.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(500);

/// An attempt that received this many bytes counts as progress and resets the retries.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Limit on the size of a file; those of releases are far smaller.
const MAX_FILE_SIZE: u64 = 2 << 30;

/// Limit on the size of a list of checksums.
const MAX_TEXT_SIZE: usize = 1 << 20;

/// A file on a server.
#[derive(Debug, Clone)]
pub struct DownloadSource {
    /// Kubernetes or etcd.
    pub product: &'static str,
    /// The version it belongs to.
    pub version: String,
    /// Its URL.
    pub url: Url,
}

/// A failed attempt.
enum AttemptError {
    /// A retry may succeed.
    Transient {
        source: Box<dyn Error + Send + Sync>,
        connected: bool,
    },
    /// A retry is pointless.
    Permanent(FetchError),
}

impl<E: Into<FetchError>> From<E> for AttemptError {
    fn from(error: E) -> Self {
        Self::Permanent(error.into())
    }
}

/// The HTTP client of all downloads.
pub fn http_client() -> Result<Client, FetchError> {
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
pub async fn download_text(client: &Client, source: &DownloadSource) -> Result<String, FetchError> {
    let mut retries = Retries::new(source);
    loop {
        match try_download_text(client, source).await {
            Ok(text) => return Ok(text),
            Err(error) => retries.wait_or_fail(error, |_| {}).await?,
        }
    }
}

async fn try_download_text(
    client: &Client,
    source: &DownloadSource,
) -> Result<String, AttemptError> {
    let mut response = send(source, client.get(source.url.clone())).await?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(transient)? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_TEXT_SIZE {
            return Err(FetchError::TooLarge {
                url: without_credentials(&source.url),
            }
            .into());
        }
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

/// Downloads `source` into `part` until it is complete and its digest is `expected`.
pub async fn download(
    client: &Client,
    source: &DownloadSource,
    expected: &Sha256Digest,
    part: &mut PartialDownload,
    mut progress: FileProgress,
) -> Result<(), FetchError> {
    let mut retries = Retries::new(source);
    let mut may_start_over = true;
    loop {
        let len_before = part.len();
        match attempt(client, source, expected, part, &mut progress).await {
            Ok(()) if part.digest() == *expected => {
                progress.finish(part.len());
                return Ok(());
            }
            Ok(()) => {
                let actual = part.digest();
                let is_resumed = part.is_resumed();
                part.restart(None).await?;
                if !(is_resumed && may_start_over) {
                    part.remove();
                    return Err(FetchError::Checksum {
                        file: part.name().to_owned(),
                        url: without_credentials(&source.url),
                        expected: hex(expected),
                        got: hex(&actual),
                    });
                }
                // The parts may come from different files: the server's file changed, or the disk lost data.
                may_start_over = false;
                progress.note("the resumed file has a wrong checksum; starting over");
            }
            Err(error) => {
                // Save the received bytes for the next attempt or run.
                part.flush().await?;
                if part.len() >= len_before + PROGRESS_BYTES {
                    retries = Retries::new(source);
                }
                retries
                    .wait_or_fail(error, |text| progress.note(text))
                    .await?;
            }
        }
    }
}

/// Requests the bytes that `part` lacks.
async fn attempt(
    client: &Client,
    source: &DownloadSource,
    expected: &Sha256Digest,
    part: &mut PartialDownload,
    progress: &mut FileProgress,
) -> Result<(), AttemptError> {
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
            return Err(AttemptError::Transient {
                source: "the server sent another range".into(),
                connected: true,
            });
        }
        _ => part.restart(strong_etag(&response)).await?,
    }
    let total = response.content_length().map(|rest| part.len() + rest);
    let too_large = || FetchError::TooLarge {
        url: without_credentials(&source.url),
    };
    if total.is_some_and(|total| total > MAX_FILE_SIZE) {
        return Err(too_large().into());
    }
    progress.begin(part.len(), total);
    part.set_total(total);
    while let Some(chunk) = response.chunk().await.map_err(transient)? {
        part.append(&chunk).await?;
        progress.advance(part.len());
        if part.len() > MAX_FILE_SIZE {
            return Err(too_large().into());
        }
    }
    part.flush().await?;
    Ok(())
}

async fn send(source: &DownloadSource, request: RequestBuilder) -> Result<Response, AttemptError> {
    let response = request.send().await.map_err(transient)?;
    let status = response.status();
    let url = || without_credentials(&source.url);
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => Err(FetchError::NoSuchVersion {
            product: source.product,
            version: source.version.clone(),
            url: url(),
        }
        .into()),
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Err(error_status(status)),
        status if status.is_server_error() => Err(error_status(status)),
        StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            Ok(response)
        }
        status => Err(FetchError::Status { url: url(), status }.into()),
    }
}

fn error_status(status: StatusCode) -> AttemptError {
    AttemptError::Transient {
        source: format!("the server answered {status}").into(),
        connected: true,
    }
}

fn transient(error: reqwest::Error) -> AttemptError {
    let connected = !error.is_connect();
    // Drop the URL, which may contain a mirror's password. The error message adds it without the password.
    AttemptError::Transient {
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
pub fn without_credentials(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.into()
}

/// The failed attempts of one download.
struct Retries<'a> {
    source: &'a DownloadSource,
    failures: u32,
}

impl<'a> Retries<'a> {
    fn new(source: &'a DownloadSource) -> Self {
        Retries {
            source,
            failures: 0,
        }
    }

    /// Waits before the next attempt. Returns the error if it is permanent or the retries are used up.
    async fn wait_or_fail(
        &mut self,
        error: AttemptError,
        note: impl FnOnce(&str),
    ) -> Result<(), FetchError> {
        let (source, connected) = match error {
            AttemptError::Transient { source, connected } => (source, connected),
            AttemptError::Permanent(error) => return Err(error),
        };
        self.failures += 1;
        let (url, tries) = (without_credentials(&self.source.url), self.failures);
        if self.failures > MAX_RETRIES {
            return Err(match connected {
                true => FetchError::Interrupted { url, tries, source },
                false => FetchError::Unreachable { url, tries, source },
            });
        }
        let delay = FIRST_RETRY_DELAY * (1 << (self.failures - 1));
        note(&format!(
            "{}; trying again in {:.1} s",
            images::error_chain(&*source),
            delay.as_secs_f64()
        ));
        tokio::time::sleep(delay).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_of_a_mirror_are_not_shown() {
        let url = Url::parse("https://user:secret@mirror.example/k8s/x").unwrap();
        assert_eq!(without_credentials(&url), "https://mirror.example/k8s/x");
    }
}
