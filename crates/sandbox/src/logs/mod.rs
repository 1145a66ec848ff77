//! What containers say: written in the CRI's log format, rotated, and read back.
//!
//! ```text
//!   DIR/CONTAINER/ATTEMPT.log      the log of one run; DIR/CONTAINER/ATTEMPT.log.1, .2, …: what was there before
//!
//!   pipes ── writer.rs ── record.rs (bytes to records) ──► files of place.rs
//!                 │ how far
//!                 ▼
//!            reader.rs ── tail.rs (where to begin), select.rs (records to bytes) ──► kubectl logs
//! ```
//!
//! Writer and reader live in the same process, so whoever follows a log is woken and never polls. Logs of runs that
//! are over can be read by anybody who sees the files: a kubelet shows those of finished pods that way.
//!
//! Start reading at [`LogDir`].

#[cfg(test)]
mod fuzz;
mod place;
mod reader;
mod record;
mod select;
mod tail;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::{HashMap, VecDeque};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::stream::{self, StreamExt, TryStreamExt};
use tokio::sync::watch;

use place::{Place, Progress};
use pod_protocol::connection::LogBytes;
use pod_protocol::{LogQuery, Problem};
use reader::Reading;
use select::Wanted;
use writer::LogFile;
pub use writer::LogWriter;

/// How much of a log is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How large one file may get.
    pub segment_bytes: u64,
    /// How many files there may be for one run of a container.
    pub segments: u64,
}

impl Default for Limits {
    /// Upstream's `containerLogMaxSize` and `containerLogMaxFiles`.
    fn default() -> Self {
        Self {
            segment_bytes: 10 * 1024 * 1024,
            segments: 5,
        }
    }
}

/// A log that can't be written or read.
#[derive(Debug, thiserror::Error)]
#[error("the log of container {container} can't be {done}")]
pub struct LogError {
    container: String,
    done: &'static str,
    #[source]
    source: io::Error,
}

/// The logs of a pod's containers. Clones are the same logs.
#[derive(Clone, Debug)]
pub struct LogDir {
    path: PathBuf,
    limits: Limits,
    live: LiveLogs,
}

/// By container and attempt: the logs that are being written.
type LiveLogs = Arc<Mutex<HashMap<(String, u32), watch::Receiver<Progress>>>>;

impl LogDir {
    /// The logs in a directory, which is made when there is something to write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::with_limits(path, Limits::default())
    }

    /// The same, with other limits than upstream's.
    pub fn with_limits(path: impl Into<PathBuf>, limits: Limits) -> Self {
        Self {
            path: path.into(),
            limits,
            live: LiveLogs::default(),
        }
    }

    /// Begins the log of a run of a container. Of the runs before it, only the last one's log is kept.
    pub fn writer(&self, container: &str, attempt: u32) -> Result<LogWriter, LogError> {
        self.try_writer(container, attempt)
            .map_err(|source| LogError {
                container: container.to_owned(),
                done: "written",
                source,
            })
    }

    fn try_writer(&self, container: &str, attempt: u32) -> io::Result<LogWriter> {
        let dir = self.dir(container)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        place::remove_before(&dir, attempt.saturating_sub(1))?;
        let place = Place::new(dir, attempt);
        let (_, written) = place.survey()?;
        let (progress, written) = watch::channel(written);
        let file = place.write()?;
        let mut log = LogFile::new(place, self.limits, file, progress);
        // On a full disk, what is torn stays torn.
        let _ = log.mend();
        let key = (container.to_owned(), attempt);
        lock(&self.live).insert(key.clone(), written);
        Ok(LogWriter::new(
            log,
            Live {
                key,
                logs: Arc::clone(&self.live),
            },
        ))
    }

    /// A part of the log of a container's newest run, or of the one before that.
    pub async fn read(&self, query: &LogQuery) -> Result<LogBytes, Problem> {
        let wanted = Wanted::of(query)?;
        let attempt = self.attempt(&query.container, query.previous)?;
        let reading = self
            .reading(
                &query.container,
                attempt,
                query.follow,
                query.tail_lines,
                wanted,
            )
            .await
            .map_err(|source| unreadable(&query.container, &source))?;
        Ok(stream::try_unfold(reading, Reading::next).boxed())
    }

    /// The last lines of a log, at most so many bytes of them; for termination messages. Empty if there is no log.
    pub async fn tail_text(
        &self,
        container: &str,
        attempt: u32,
        lines: u64,
        bytes: usize,
    ) -> String {
        let reading = self.reading(container, attempt, false, Some(lines), Wanted::default());
        let collected = async {
            let log = stream::try_unfold(reading.await?, Reading::next);
            log.try_fold(VecDeque::new(), |mut last, more| async move {
                last.extend(more);
                last.drain(..last.len().saturating_sub(bytes));
                Ok(last)
            })
            .await
        };
        let last: Vec<u8> = match collected.await {
            Ok(last) => last.into(),
            Err(error) => {
                tracing::debug!(container, attempt, %error, "no log for a termination message");
                Vec::new()
            }
        };
        // Where it was cut, a character may have been cut too.
        let torn = last.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80);
        let whole = if last.len() == bytes { torn.count() } else { 0 };
        String::from_utf8_lossy(&last[whole..]).into_owned()
    }

    async fn reading(
        &self,
        container: &str,
        attempt: u32,
        follow: bool,
        tail: Option<u64>,
        wanted: Wanted,
    ) -> io::Result<Reading> {
        let written = lock(&self.live)
            .get(&(container.to_owned(), attempt))
            .cloned();
        let place = Place::new(self.dir(container)?, attempt);
        Reading::start(place, written, follow, tail, wanted).await
    }

    fn attempt(&self, container: &str, previous: bool) -> Result<u32, Problem> {
        let attempts = self
            .dir(container)
            .and_then(|dir| place::attempts(&dir))
            .map_err(|source| unreadable(container, &source))?;
        let found = attempts.iter().rev().nth(usize::from(previous));
        found.copied().ok_or_else(|| Problem {
            reason: "NotFound".to_owned(),
            message: if previous {
                format!("previous terminated container {container:?} not found")
            } else {
                format!("container {container:?} has no log yet")
            },
        })
    }

    fn dir(&self, container: &str) -> io::Result<PathBuf> {
        // The API server lets only such names pass; but this becomes a path.
        let harmless = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if container.is_empty() || !container.bytes().all(harmless) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "that is no container's name",
            ));
        }
        Ok(self.path.join(container))
    }
}

/// A log that is being written, until this goes.
#[derive(Debug)]
struct Live {
    key: (String, u32),
    logs: LiveLogs,
}

impl Drop for Live {
    fn drop(&mut self) {
        lock(&self.logs).remove(&self.key);
    }
}

fn lock(live: &LiveLogs) -> MutexGuard<'_, HashMap<(String, u32), watch::Receiver<Progress>>> {
    // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
    live.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unreadable(container: &str, source: &io::Error) -> Problem {
    Problem {
        reason: "LogUnavailable".to_owned(),
        message: format!("the log of container {container:?} can't be read: {source}"),
    }
}
