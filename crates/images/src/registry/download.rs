//! Downloading one blob: checked while it streams, resumed when the connection breaks, and resumed
//! by the next pull when this one ends.

use std::time::{Duration, Instant};

use reqwest::header::CONTENT_RANGE;
use reqwest::{Response, StatusCode};

use super::error::RegistryError;
use super::source::Source;
use crate::error::causes;
use crate::manifest::Descriptor;
use crate::progress::{Event, Progress};
use crate::store::{Grant, Partial};

/// How often a broken connection is tried again without getting anywhere.
const RETRIES: u32 = 4;

/// The pause before the first retry; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// An attempt that brought this much counts as getting somewhere.
const SOMEWHERE: u64 = 1 << 20;

/// Nobody looks at a bar more often.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A failed attempt.
enum Trouble {
    /// Another attempt may succeed.
    Passing(RegistryError),
    /// It won't.
    Lasting(RegistryError),
}

impl<E: Into<RegistryError>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Trouble::Lasting(error.into())
    }
}

/// Downloads what `partial` lacks of `blob`, until it is complete and verified. Says to whom the source has sent its parts.
pub async fn download(
    source: &Source,
    blob: &Descriptor,
    partial: &mut Partial,
    progress: &dyn Progress,
) -> Result<Vec<Grant>, RegistryError> {
    let mut failures = 0;
    let mut again = true;
    let mut grants = Vec::new();
    loop {
        let before = partial.len();
        match attempt(source, blob, partial, &mut grants, progress).await {
            Ok(()) => {
                let resumed = partial.resumed();
                let Err(got) = partial.verify() else {
                    return Ok(grants);
                };
                partial.restart()?;
                if !(resumed && again) {
                    return Err(RegistryError::Digest {
                        host: source.host().to_owned(),
                        expected: blob.digest,
                        got,
                    });
                }
                // Pieces of different files, perhaps: the disk lost some.
                again = false;
            }
            Err(Trouble::Lasting(error)) => return Err(error),
            Err(Trouble::Passing(error)) => {
                if partial.len() >= before + SOMEWHERE {
                    failures = 0;
                }
                failures += 1;
                if failures > RETRIES {
                    return Err(error);
                }
                let pause = FIRST_PAUSE * (1 << (failures - 1));
                let text = format!(
                    "{}; trying again in {:.1} s",
                    causes(&error),
                    pause.as_secs_f64()
                );
                progress.event(Event::Note { text });
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// One request for what `partial` lacks.
async fn attempt(
    source: &Source,
    blob: &Descriptor,
    partial: &mut Partial,
    grants: &mut Vec<Grant>,
    progress: &dyn Progress,
) -> Result<(), Trouble> {
    if partial.len() > blob.size {
        partial.restart()?;
    }
    if partial.len() == blob.size && blob.size > 0 {
        return Ok(());
    }
    let (mut response, grant) = source.blob(blob.digest, partial.len()).await?;
    grants.push(grant);
    let nonsense = |said: &str| RegistryError::Nonsense {
        what: blob.digest.to_string(),
        host: source.host().to_owned(),
        said: said.to_owned(),
    };
    match response.status() {
        StatusCode::PARTIAL_CONTENT if range_start(&response) == Some(partial.len()) => {}
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            partial.restart()?;
            return Err(Trouble::Passing(nonsense("sent another range")));
        }
        _ => partial.restart()?,
    }
    let begin = Event::Begin {
        blob: blob.digest,
        at: partial.len(),
        total: blob.size,
    };
    progress.event(begin);
    let mut told = Instant::now();
    loop {
        let chunk = match response.chunk().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(error) => return Err(Trouble::Passing(source.broken(1, error))),
        };
        if partial.len() + chunk.len() as u64 > blob.size {
            partial.restart()?;
            return Err(nonsense("sends more than the manifest says").into());
        }
        partial.append(&chunk)?;
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            progress.event(Event::Advance {
                blob: blob.digest,
                at: partial.len(),
            });
        }
    }
    match partial.len() == blob.size {
        true => Ok(()),
        false => Err(Trouble::Passing(nonsense("sent less than it should have"))),
    }
}

/// The first byte of the range that the server sends: `bytes 100-199/200`.
fn range_start(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    let start = range.strip_prefix("bytes ")?.split_once('-')?.0;
    start.parse().ok()
}
