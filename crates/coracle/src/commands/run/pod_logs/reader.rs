//! Reads the logs of one container, from its first run to its last.

use std::sync::Arc;
use std::time::Duration;

use futures::{AsyncBufRead, AsyncBufReadExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::ContainerKey;
use super::cursor::{LogCursor, OverlapFilter, split_time};
use super::line::{LinePiece, LineSplitter};
use super::output::LogOutput;
use super::runs::{ContainerRuns, LogRequest, ReadRuns, next_request};

/// Logs that are followed at the same time: each needs a connection to the API server. The others are polled.
const MAX_FOLLOWED: usize = 256;
/// Logs that are read to their end at the same time.
const MAX_POLLED: usize = 8;
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// A log of an ended container that cannot be read so many times in a row is given up.
const MAX_FAILURES: u32 = 10;
/// A silent stream is opened again: the node may have been lost and have come back.
const MAX_SILENCE: Duration = Duration::from_secs(60);
/// Time in which the stream of an ended container has to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// A stream without data for this long after the nodes have ended has no more.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(300);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// The part of a response that is handled at once.
const MAX_CHUNK: usize = 64 * 1024;

/// Limits the streams of all containers together.
#[derive(Debug)]
pub struct ReadLimits {
    followed: Semaphore,
    polled: Semaphore,
}

impl Default for ReadLimits {
    fn default() -> Self {
        Self {
            followed: Semaphore::new(MAX_FOLLOWED),
            polled: Semaphore::new(MAX_POLLED),
        }
    }
}

/// Reads the logs of one container.
pub struct ContainerReader {
    pub pods: Api<Pod>,
    pub container: Arc<ContainerKey>,
    pub runs: watch::Receiver<ContainerRuns>,
    pub limits: Arc<ReadLimits>,
    pub output: LogOutput,
    /// The cluster has ended: no further request would succeed.
    pub closing: CancellationToken,
}

/// What was read so far.
#[derive(Default)]
struct ReadState {
    runs: ReadRuns,
    cursor: LogCursor,
    /// The end of the log, without a line break. Until the run has ended it is not counted as read: the next request returns its complete
    /// line.
    unfinished: Option<UnfinishedLine>,
}

/// A line without a line break, and its time.
struct UnfinishedLine {
    piece: LinePiece,
    time: Option<String>,
}

impl ContainerReader {
    /// Reads until the last run has ended, or `closing`.
    pub async fn run(mut self) {
        let mut state = ReadState::default();
        self.read_all(&mut state).await;
        self.write_unfinished(&mut state).await;
    }

    async fn read_all(&mut self, state: &mut ReadState) {
        let mut failures = 0;
        loop {
            let runs = self.runs.borrow_and_update().clone();
            let Some(request) = next_request(&runs, &state.runs) else {
                if runs.is_last || !self.wait_for_change(None).await {
                    return;
                }
                continue;
            };
            let pause = match self.read(&request, state).await {
                Ok(_) if request.run.has_ended => {
                    if request.is_previous {
                        state.cursor.fill_gaps();
                    }
                    state.runs.insert(&request);
                    failures = 0;
                    self.write_unfinished(state).await;
                    continue;
                }
                Ok(IsFollowed(true)) => RETRY_INTERVAL,
                Ok(IsFollowed(false)) => POLL_INTERVAL,
                Err(error) => {
                    failures += 1;
                    tracing::debug!(container = ?self.container, error = format!("{error:#}"), failures, "cannot read a log");
                    if request.run.has_ended && (failures >= MAX_FAILURES || is_missing(&error)) {
                        // A successor with the same name may exist, whose log this is not.
                        state.runs.insert(&request);
                        failures = 0;
                        continue;
                    }
                    RETRY_INTERVAL
                }
            };
            if !self.wait_for_change(Some(pause)).await {
                return;
            }
        }
    }

    /// Writes the last line of a run: a later run must not continue it.
    async fn write_unfinished(&self, state: &mut ReadState) {
        let Some(UnfinishedLine { piece, time }) = state.unfinished.take() else {
            return;
        };
        if let Some(time) = time {
            state.cursor.advance(&time);
        }
        self.output.write(&self.container, vec![piece]).await;
    }

    /// Waits for another status of the container, at most `timeout`. False if there is nothing more to read.
    async fn wait_for_change(&mut self, timeout: Option<Duration>) -> bool {
        let sleep = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.closing.cancelled() => false,
            changed = self.runs.changed() => changed.is_ok(),
            () = sleep => true,
        }
    }

    /// Reads a log from the cursor to its end, or as long as the run continues.
    async fn read(
        &mut self,
        request: &LogRequest,
        state: &mut ReadState,
    ) -> anyhow::Result<IsFollowed> {
        let limits = Arc::clone(&self.limits);
        let followed = match request.run.has_ended {
            true => None,
            false => limits.followed.try_acquire().ok(),
        };
        let follow = followed.is_some();
        let _polled = match follow {
            true => None,
            false => Some(limits.polled.acquire().await?),
        };
        let params = LogParams {
            container: Some(self.container.container.clone()),
            follow,
            previous: request.is_previous,
            since_time: state.cursor.since(request.is_previous),
            timestamps: true,
            ..LogParams::default()
        };
        let pods = self.pods.clone();
        let response = pods.log_stream(&self.container.pod, &params);
        let stream = tokio::select! {
            response = tokio::time::timeout(RESPONSE_TIMEOUT, response) => response??,
            () = self.closing.cancelled() => anyhow::bail!("the cluster has ended"),
        };
        let mut stream = std::pin::pin!(stream);
        let mut lines = NewLines::resume(&mut state.cursor, request.is_previous);
        while let Some(bytes) = self.next_bytes(stream.as_mut(), request).await? {
            let pieces = lines.push(&bytes, &mut state.cursor);
            self.output.write(&self.container, pieces).await;
        }
        state.unfinished = lines.finish();
        Ok(IsFollowed(follow))
    }

    /// The next part of a stream; `None` at its end, and if it is to be opened again.
    async fn next_bytes(
        &mut self,
        mut stream: std::pin::Pin<&mut impl AsyncBufRead>,
        request: &LogRequest,
    ) -> std::io::Result<Option<Vec<u8>>> {
        loop {
            let runs_on = |runs: &ContainerRuns| runs.newest.as_ref() == Some(&request.run);
            let has_ended = request.run.has_ended || !runs_on(&self.runs.borrow());
            let is_closing = self.closing.is_cancelled();
            let timeout = match has_ended && !request.run.has_ended {
                _ if is_closing => CLOSE_TIMEOUT,
                true => END_TIMEOUT,
                false => MAX_SILENCE,
            };
            tokio::select! {
                bytes = stream.fill_buf() => {
                    let bytes = bytes?;
                    let bytes = bytes[..bytes.len().min(MAX_CHUNK)].to_vec();
                    stream.as_mut().consume(bytes.len());
                    return Ok((!bytes.is_empty()).then_some(bytes));
                }
                () = tokio::time::sleep(timeout) => return Ok(None),
                () = self.closing.cancelled(), if !is_closing => {}
                Ok(_) = self.runs.wait_for(|runs| !runs_on(runs)), if !has_ended => {}
            }
        }
    }
}

/// Whether the log was followed: read until the run ended.
struct IsFollowed(bool);

/// Whether the API server has no such log, and never will.
fn is_missing(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 404)
}

/// Turns one stream into lines, without those that were read before.
struct NewLines {
    splitter: LineSplitter,
    overlap: OverlapFilter,
    /// The time of the current line, if it has one.
    time: Option<String>,
    is_new: bool,
}

impl NewLines {
    fn resume(cursor: &mut LogCursor, is_previous: bool) -> Self {
        Self {
            splitter: LineSplitter::default(),
            overlap: cursor.resume(is_previous),
            time: None,
            is_new: true,
        }
    }

    fn push(&mut self, bytes: &[u8], cursor: &mut LogCursor) -> Vec<LinePiece> {
        let mut split = Vec::new();
        self.splitter.push(bytes, |piece| split.push(piece));
        let mut new = Vec::new();
        for mut piece in split {
            self.start_line(&mut piece);
            if let (true, true, Some(time)) = (self.is_new, piece.ends_line, &self.time) {
                cursor.advance(time);
            }
            if self.is_new {
                new.push(piece);
            }
        }
        new
    }

    /// The last line, if it has no line break.
    fn finish(mut self) -> Option<UnfinishedLine> {
        let mut piece = std::mem::take(&mut self.splitter).finish()?;
        self.start_line(&mut piece);
        let time = self.time;
        (self.is_new && !piece.text.is_empty()).then_some(UnfinishedLine { piece, time })
    }

    fn start_line(&mut self, piece: &mut LinePiece) {
        if !piece.starts_line {
            return;
        }
        let Some((time, text)) = split_time(&piece.text) else {
            self.time = None;
            self.is_new = true;
            return;
        };
        self.is_new = self.overlap.is_new(time);
        self.time = Some(time.to_owned());
        piece.text = text.to_vec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(lines: std::ops::Range<u32>) -> String {
        lines
            .map(|n| format!("2026-01-01T00:00:01.{n:09}Z line {n}\n"))
            .collect()
    }

    fn text(pieces: &[LinePiece]) -> Vec<String> {
        pieces
            .iter()
            .map(|piece| String::from_utf8_lossy(&piece.text).into_owned())
            .collect()
    }

    #[test]
    fn broken_stream_is_continued_in_the_middle_of_a_line() {
        let log = log(0..5);
        for broken_at in 0..log.len() {
            let mut cursor = LogCursor::default();
            let mut first = NewLines::resume(&mut cursor, false);
            let mut shown = first.push(&log.as_bytes()[..broken_at], &mut cursor);
            let mut second = NewLines::resume(&mut cursor, false);
            shown.extend(second.push(log.as_bytes(), &mut cursor));
            assert!(second.finish().is_none());
            assert_eq!(
                text(&shown),
                ["line 0", "line 1", "line 2", "line 3", "line 4"]
            );
        }
    }

    #[test]
    fn last_line_needs_no_line_break() {
        let mut cursor = LogCursor::default();
        let mut lines = NewLines::resume(&mut cursor, false);
        let log = format!("{}2026-01-01T00:00:02.000000000Z end", log(0..1));
        assert_eq!(text(&lines.push(log.as_bytes(), &mut cursor)), ["line 0"]);
        assert_eq!(text(&[lines.finish().unwrap().piece]), ["end"]);
    }
}
