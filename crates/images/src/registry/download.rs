//! Downloads one blob: hashes it as it streams, resumes after a lost connection, and leaves a partial file for the next
//! pull to resume.

use std::time::{Duration, Instant};

use reqwest::header::CONTENT_RANGE;
use reqwest::{Response, StatusCode};

use super::error::RegistryError;
use super::source::PullSource;
use crate::error::error_chain;
use crate::manifest::Descriptor;
use crate::progress::{PullEvent, PullProgress};
use crate::store::{Grant, PartialBlob};

/// Retries after a lost connection, reset by progress.
const MAX_RETRIES: u32 = 4;

/// The back-off before the first retry; it doubles with each.
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);

/// An attempt that downloads this much resets the retry count.
const RETRY_RESET_BYTES: u64 = 1 << 20;

/// The interval of progress events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The error of one attempt.
enum AttemptError {
    /// A retry may succeed.
    Transient(RegistryError),
    /// A retry is useless.
    Permanent(RegistryError),
}

impl<E: Into<RegistryError>> From<E> for AttemptError {
    fn from(error: E) -> Self {
        AttemptError::Permanent(error.into())
    }
}

/// Downloads the rest of `blob` into `partial`, and verifies it. Returns the grant under which the source sent each part.
pub async fn download(
    source: &PullSource,
    blob: &Descriptor,
    partial: &mut PartialBlob,
    progress: &dyn PullProgress,
) -> Result<Vec<Grant>, RegistryError> {
    let mut failures = 0;
    let mut may_restart = true;
    let mut grants = Vec::new();
    loop {
        let before = partial.len();
        match attempt(source, blob, partial, &mut grants, progress).await {
            Ok(()) => {
                let resumed = partial.resumed();
                let Err(actual) = partial.verify() else {
                    return Ok(grants);
                };
                partial.restart()?;
                if !(resumed && may_restart) {
                    return Err(RegistryError::DigestMismatch {
                        host: source.host().to_owned(),
                        expected: blob.digest,
                        got: actual,
                    });
                }
                // The resumed part may have been damaged on disk: download the whole blob again, but only once.
                may_restart = false;
            }
            Err(AttemptError::Permanent(error)) => return Err(error),
            Err(AttemptError::Transient(error)) => {
                if partial.len() >= before + RETRY_RESET_BYTES {
                    failures = 0;
                }
                failures += 1;
                if failures > MAX_RETRIES {
                    return Err(error);
                }
                let backoff = INITIAL_BACKOFF * (1 << (failures - 1));
                let text = format!(
                    "{}; retrying in {:.1} s",
                    error_chain(&error),
                    backoff.as_secs_f64()
                );
                progress.event(PullEvent::Note { text });
                tokio::time::sleep(backoff).await;
            }
        }
    }
}

/// One request for the missing part.
async fn attempt(
    source: &PullSource,
    blob: &Descriptor,
    partial: &mut PartialBlob,
    grants: &mut Vec<Grant>,
    progress: &dyn PullProgress,
) -> Result<(), AttemptError> {
    if partial.len() > blob.size {
        partial.restart()?;
    }
    if partial.len() == blob.size && blob.size > 0 {
        return Ok(());
    }
    let (mut response, grant) = source.blob(blob.digest, partial.len()).await?;
    grants.push(grant);
    let invalid = |detail: &str| RegistryError::InvalidResponse {
        subject: blob.digest.to_string(),
        host: source.host().to_owned(),
        detail: detail.to_owned(),
    };
    match response.status() {
        StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(partial.len()) => {}
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            partial.restart()?;
            return Err(AttemptError::Transient(invalid("sent another range")));
        }
        _ => partial.restart()?,
    }
    let begin = PullEvent::Begin {
        blob: blob.digest,
        at: partial.len(),
        total: blob.size,
    };
    progress.event(begin);
    let mut last_event = Instant::now();
    loop {
        let chunk = match response.chunk().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(error) => return Err(AttemptError::Transient(source.connection_error(1, error))),
        };
        if partial.len() + chunk.len() as u64 > blob.size {
            partial.restart()?;
            return Err(invalid("sent more bytes than the manifest says").into());
        }
        partial.append(&chunk)?;
        if last_event.elapsed() > PROGRESS_INTERVAL {
            last_event = Instant::now();
            progress.event(PullEvent::Advance {
                blob: blob.digest,
                at: partial.len(),
            });
        }
    }
    match partial.len() == blob.size {
        true => Ok(()),
        false => Err(AttemptError::Transient(invalid(
            "sent fewer bytes than the manifest says",
        ))),
    }
}

/// The offset of the first byte in a `Content-Range` such as `bytes 100-199/200`.
fn range_start(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    let start = range.strip_prefix("bytes ")?.split_once('-')?.0;
    start.parse().ok()
}
