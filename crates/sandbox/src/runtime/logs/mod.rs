//! Container logs: written in the CRI's format, rotated, and read back.
//!
//! ```text
//!   DIR/CONTAINER/ATTEMPT.log      the log of one attempt; rotated files are ATTEMPT.log.1, .2, …
//!
//!   pipes ── writer.rs ── record.rs (bytes to records) ──► files.rs
//!                 │ WritePosition
//!                 ▼
//!            reader.rs ── tail.rs (finds the start), filter.rs (records to bytes) ──► kubectl logs
//! ```
//!
//! Writer and readers live in the same process, so followers are notified and need not poll. Any process that sees the files can
//! read complete logs: the kubelet serves those of finished pods that way.
//!
//! Start reading at [`LogDir`].

mod files;
mod filter;
#[cfg(test)]
mod fuzz;
mod reader;
mod record;
mod tail;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::{HashMap, VecDeque};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures::stream::{self, StreamExt, TryStreamExt};
use pod_protocol::connection::LogByteStream;
use pod_protocol::{LogQuery, RequestError};
use tokio::sync::watch;

use self::files::{LogFiles, WritePosition};
use self::filter::LogFilter;
use self::reader::LogReader;
use self::writer::LogFile;
pub use self::writer::LogWriter;

/// Limits for rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// Maximum size of one file.
    pub max_file_bytes: u64,
    /// Maximum number of files per attempt of a container.
    pub max_files: u64,
}

impl Default for LogLimits {
    /// Upstream's `containerLogMaxSize` and `containerLogMaxFiles`.
    fn default() -> Self {
        Self {
            max_file_bytes: 10 * 1024 * 1024,
            max_files: 5,
        }
    }
}

/// The logs of a pod's containers. Clones share their state.
#[derive(Clone, Debug)]
pub struct LogDir {
    path: PathBuf,
    limits: LogLimits,
    live: LiveLogs,
}

/// The logs that are being written, by container and attempt.
type LiveLogs = Arc<Mutex<HashMap<(String, u32), watch::Receiver<WritePosition>>>>;

impl LogDir {
    /// The logs in a directory, which is created with the first log.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::with_limits(path, LogLimits::default())
    }

    /// As [`new`](Self::new), with other limits than upstream's.
    pub fn with_limits(path: impl Into<PathBuf>, limits: LogLimits) -> Self {
        Self {
            path: path.into(),
            limits,
            live: LiveLogs::default(),
        }
    }

    /// Starts the log of an attempt of a container. Of earlier attempts, only the last one's log is kept.
    pub fn writer(&self, container: &str, attempt: u32) -> io::Result<LogWriter> {
        let dir = self.dir(container)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        files::remove_before(&dir, attempt.saturating_sub(1))?;
        let files = LogFiles::new(dir, attempt);
        let (_, written) = files.scan()?;
        let (position, written) = watch::channel(written);
        let file = files.append()?;
        let mut log = LogFile::new(files, self.limits, file, position);
        // Ignore the error: the disk may be full.
        let _ = log.terminate_last_record();
        let key = (container.to_owned(), attempt);
        self.live.lock().unwrap().insert(key.clone(), written);
        Ok(LogWriter::new(
            log,
            LiveLog {
                key,
                logs: Arc::clone(&self.live),
            },
        ))
    }

    /// Reads the log of a container's last attempt, or of the one before.
    pub async fn read(&self, query: &LogQuery) -> Result<LogByteStream, RequestError> {
        let filter = LogFilter::new(query)?;
        let attempt = self.attempt(&query.container, query.previous)?;
        let reader = self
            .reader(
                &query.container,
                attempt,
                query.follow,
                query.tail_lines,
                filter,
            )
            .await
            .map_err(|source| unreadable(&query.container, &source))?;
        Ok(stream::try_unfold(reader, LogReader::next).boxed())
    }

    /// The last lines of a log, at most `bytes` of them, for termination messages. Empty if there is no log.
    pub async fn tail_text(
        &self,
        container: &str,
        attempt: u32,
        lines: u64,
        bytes: usize,
    ) -> String {
        let reader = self.reader(container, attempt, false, Some(lines), LogFilter::default());
        let collected = async {
            let log = stream::try_unfold(reader.await?, LogReader::next);
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
                tracing::debug!(container, attempt, %error, "cannot read log for termination message");
                Vec::new()
            }
        };
        // The cut may be in the middle of a UTF-8 character.
        let continuation = last.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80);
        let start = if last.len() == bytes {
            continuation.count()
        } else {
            0
        };
        String::from_utf8_lossy(&last[start..]).into_owned()
    }

    async fn reader(
        &self,
        container: &str,
        attempt: u32,
        follow: bool,
        tail: Option<u64>,
        filter: LogFilter,
    ) -> io::Result<LogReader> {
        let written = self
            .live
            .lock()
            .unwrap()
            .get(&(container.to_owned(), attempt))
            .cloned();
        let files = LogFiles::new(self.dir(container)?, attempt);
        LogReader::start(files, written, follow, tail, filter).await
    }

    fn attempt(&self, container: &str, previous: bool) -> Result<u32, RequestError> {
        let attempts = self
            .dir(container)
            .and_then(|dir| files::attempts(&dir))
            .map_err(|source| unreadable(container, &source))?;
        let found = attempts.iter().rev().nth(usize::from(previous));
        found.copied().ok_or_else(|| {
            RequestError::not_found(if previous {
                format!("previous terminated container {container:?} not found")
            } else {
                format!("container {container:?} has no log yet")
            })
        })
    }

    fn dir(&self, container: &str) -> io::Result<PathBuf> {
        // The API server validates names, but this one becomes a path.
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if container.is_empty() || !container.bytes().all(is_valid) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "invalid container name",
            ));
        }
        Ok(self.path.join(container))
    }
}

/// Registers a log that is being written; dropping it ends the logs of followers.
#[derive(Debug)]
struct LiveLog {
    key: (String, u32),
    logs: LiveLogs,
}

impl Drop for LiveLog {
    fn drop(&mut self) {
        self.logs.lock().unwrap().remove(&self.key);
    }
}

fn unreadable(container: &str, source: &io::Error) -> RequestError {
    RequestError::failed(format!(
        "cannot read the log of container {container:?}: {source}"
    ))
}
