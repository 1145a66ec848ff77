//! The transfer of a file: requests the missing bytes until the file is complete.

use std::convert::Infallible;
use std::error::Error;
use std::time::{Duration, Instant};

use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, HeaderValue, IF_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode, Url};

use crate::client::body;
use crate::digest::Digest;
use crate::failure::{DownloadError, DownloadFailure, error_chain};
use crate::partial_file::PartialFile;

/// Limit on consecutive retries without progress.
const MAX_RETRIES: u32 = 4;

/// The back-off before the first retry; it doubles with each.
const TRANSFER_INITIAL_BACKOFF: Duration = Duration::from_millis(500);

/// An attempt that receives this many bytes resets the retries.
const RETRY_RESET_BYTES: u64 = 1 << 20;

/// The interval of [`DownloadEvent::Advance`].
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The size of a file to download, in bytes.
#[derive(Debug, Clone, Copy)]
pub enum FileSize {
    /// The size is known.
    Exactly(u64),
    /// Only a limit is known.
    AtMost(u64),
}

/// Progress of a download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DownloadEvent {
    /// The transfer starts, or resumes at `at` bytes.
    Begin {
        /// The number of bytes received so far.
        at: u64,
        /// The size of the file, if known.
        total: Option<u64>,
    },
    /// More bytes arrived.
    Advance {
        /// The number of bytes received so far.
        at: u64,
    },
    /// A message for the user.
    Note(String),
}

/// Downloads the missing bytes of `part`, and verifies the whole file. `request` sends a request with the given headers.
pub async fn download<E: Error + 'static>(
    mut request: impl AsyncFnMut(HeaderMap) -> Result<Response, DownloadFailure<E>>,
    expected: Digest,
    size: FileSize,
    part: &mut PartialFile,
    mut progress: impl FnMut(DownloadEvent),
) -> Result<(), DownloadError<E>> {
    let mut failures = 0;
    let mut may_restart = true;
    // The length that the retries have reached. A file that starts over makes no progress before it.
    let mut furthest = part.len();
    loop {
        let len_before = part.len();
        match attempt(&mut request, expected, size, part, &mut progress).await {
            Ok(()) => return Ok(()),
            // The parts may come from different files: the server's file changed, or the disk lost data.
            Err(DownloadFailure::WrongDigest(_)) if len_before > 0 && may_restart => {
                may_restart = false;
                let text = "the resumed file has a wrong checksum; starting over";
                progress(DownloadEvent::Note(text.to_owned()));
            }
            Err(failure) => {
                if part.len() >= furthest + RETRY_RESET_BYTES {
                    failures = 0;
                    furthest = part.len();
                }
                wait_or_fail(&mut failures, failure, &mut progress).await?;
            }
        }
    }
}

/// Downloads a body of at most `limit` bytes whose digest is unknown.
pub async fn download_small(
    client: &Client,
    url: &Url,
    limit: usize,
) -> Result<Vec<u8>, DownloadError<Infallible>> {
    let attempt = async || {
        let response = client.get(url.clone()).send().await;
        let response = checked(response.map_err(DownloadFailure::connection)?)?;
        let body = body(response, limit).await;
        body.map_err(DownloadFailure::connection)?
            .ok_or(DownloadFailure::TooLarge)
    };
    let mut failures = 0;
    loop {
        match attempt().await {
            Ok(body) => return Ok(body),
            Err(failure) => wait_or_fail(&mut failures, failure, &mut |_| {}).await?,
        }
    }
}

/// Requests the missing bytes, if there are any, and verifies the file. A file with a wrong digest is emptied.
async fn attempt<E>(
    request: &mut impl AsyncFnMut(HeaderMap) -> Result<Response, DownloadFailure<E>>,
    expected: Digest,
    size: FileSize,
    part: &mut PartialFile,
    progress: &mut impl FnMut(DownloadEvent),
) -> Result<(), DownloadFailure<E>> {
    let (FileSize::Exactly(limit) | FileSize::AtMost(limit)) = size;
    if part.len() > limit {
        part.restart(None)?;
    }
    let has_size = matches!(size, FileSize::Exactly(size) if size == part.len());
    if part.len() == 0 || !(has_size || part.digest() == expected) {
        let response = checked(request(range_headers(part)).await?)?;
        receive(response, size, limit, part, progress).await?;
    }
    let digest = part.digest();
    if digest != expected {
        part.restart(None)?;
        return Err(DownloadFailure::WrongDigest(digest));
    }
    Ok(())
}

/// Appends the body of a response to `part`.
async fn receive<E>(
    mut response: Response,
    size: FileSize,
    limit: u64,
    part: &mut PartialFile,
    progress: &mut impl FnMut(DownloadEvent),
) -> Result<(), DownloadFailure<E>> {
    match response.status() {
        StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(part.len()) => {}
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            part.restart(None)?;
            return Err(DownloadFailure::AnotherRange);
        }
        // The whole file: the server ignores ranges, or the file has changed.
        _ => part.restart(strong_etag(&response))?,
    }
    let announced = response.content_length();
    let announced = announced.map(|rest| part.len().saturating_add(rest));
    if announced.is_some_and(|announced| announced > limit) {
        part.restart(None)?;
        return Err(DownloadFailure::TooLarge);
    }
    let total = match size {
        FileSize::Exactly(size) => Some(size),
        FileSize::AtMost(_) => announced,
    };
    let at = part.len();
    progress(DownloadEvent::Begin { at, total });
    let mut last_event = Instant::now();
    let lost = DownloadFailure::connection;
    while let Some(chunk) = response.chunk().await.map_err(lost)? {
        if part.len() + chunk.len() as u64 > limit {
            part.restart(None)?;
            return Err(DownloadFailure::TooLarge);
        }
        let missing = total.map(|total| total.saturating_sub(part.len()));
        part.append(&chunk)
            .map_err(|source| DownloadFailure::File { missing, source })?;
        if last_event.elapsed() > PROGRESS_INTERVAL {
            last_event = Instant::now();
            progress(DownloadEvent::Advance { at: part.len() });
        }
    }
    match size {
        FileSize::Exactly(size) if part.len() < size => Err(DownloadFailure::TooShort),
        _ => Ok(()),
    }
}

/// The headers that ask for the bytes after those of `part`.
fn range_headers(part: &PartialFile) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if part.len() > 0
        && let Ok(range) = HeaderValue::from_str(&format!("bytes={}-", part.len()))
    {
        headers.insert(RANGE, range);
        if let Some(Ok(etag)) = part.etag().map(HeaderValue::from_str) {
            headers.insert(IF_RANGE, etag);
        }
    }
    headers
}

fn checked<E>(response: Response) -> Result<Response, DownloadFailure<E>> {
    match response.status() {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            Ok(response)
        }
        status => Err(DownloadFailure::Status(status)),
    }
}

/// The offset of the first byte in a `Content-Range` such as `bytes 100-199/200`.
fn range_start(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    let start = range.strip_prefix("bytes ")?.split_once('-')?.0;
    start.parse().ok()
}

/// The ETag, unless it is weak: a weak one does not promise the same bytes, and `If-Range` must not use it.
fn strong_etag(response: &Response) -> Option<String> {
    let etag = response.headers().get(ETAG)?.to_str().ok()?;
    (!etag.starts_with("W/")).then(|| etag.to_owned())
}

/// Waits before the next attempt. Returns the failure if it is permanent or the retries are used up.
async fn wait_or_fail<E: Error + 'static>(
    failures: &mut u32,
    failure: DownloadFailure<E>,
    progress: &mut impl FnMut(DownloadEvent),
) -> Result<(), DownloadError<E>> {
    *failures += 1;
    let tries = *failures;
    if tries > MAX_RETRIES || !failure.is_transient() {
        return Err(DownloadError { tries, failure });
    }
    let backoff = TRANSFER_INITIAL_BACKOFF * (1 << (tries - 1));
    let (text, seconds) = (error_chain(&failure), backoff.as_secs_f64());
    let text = format!("{text}; retrying in {seconds:.1} s");
    progress(DownloadEvent::Note(text));
    tokio::time::sleep(backoff).await;
    Ok(())
}
