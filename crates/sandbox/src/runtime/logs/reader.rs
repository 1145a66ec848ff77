//! Reads a log, and follows it while it is written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use tokio::sync::watch;

use super::files::{LogFiles, WritePosition};
use super::filter::{FilteredOutput, LogFilter};
use super::tail::{self, ReadPosition};

/// How much is read at a time.
const LOG_READ_SIZE: u64 = 64 * 1024;

/// Reads one log.
#[derive(Debug)]
pub(super) struct LogReader {
    files: LogFiles,
    output: FilteredOutput,
    at: ReadPosition,
    file: Option<File>,
    /// Reading ends here, or waits if the log is followed.
    end: WritePosition,
    /// While the log is being written: its current end, which also determines the names of its files.
    written: Option<watch::Receiver<WritePosition>>,
    /// At the end, wait for more.
    follow: bool,
    block: Vec<u8>,
    is_done: bool,
}

impl LogReader {
    /// Opens a log; `written` is set while the log is being written.
    pub(super) async fn start(
        files: LogFiles,
        written: Option<watch::Receiver<WritePosition>>,
        follow: bool,
        tail: Option<u64>,
        filter: LogFilter,
    ) -> io::Result<Self> {
        let (oldest, found) = files.scan()?;
        // The writer's position is more precise: the file may end in an incomplete record.
        let end = written.as_ref().map_or(found, |written| *written.borrow());
        let at = match tail {
            None => ReadPosition {
                segment: oldest,
                offset: 0,
            },
            Some(lines) => {
                let current_end = || current_end(&written, end);
                tail::find_start(&files, oldest, end, current_end, lines, &filter).await?
            }
        };
        let output = FilteredOutput::new(filter);
        Ok(Self {
            files,
            is_done: output.is_done(),
            output,
            at,
            file: None,
            end,
            follow: follow && written.is_some(),
            written,
            block: Vec::new(),
        })
    }

    /// Returns the next output, waiting for it if the log is followed; `None` at the end.
    pub(super) async fn next(mut self) -> io::Result<Option<(Bytes, Self)>> {
        while !self.is_done {
            let mut out = Vec::new();
            if let Some(written) = self.written.as_mut().filter(|_| self.follow) {
                self.end = *written.borrow_and_update();
            }
            if self.read_block()? {
                // Enough, except for the part of a record that was read with the block before.
                out.reserve(self.block.len());
                self.output.push(&self.block, &mut out);
                self.is_done = self.output.is_done();
            } else if !self.wait_for_more().await {
                self.output.finish(&mut out);
                self.is_done = true;
            }
            if !out.is_empty() {
                return Ok(Some((out.into(), self)));
            }
            // The block was filtered out completely: let other tasks run.
            tokio::task::yield_now().await;
        }
        Ok(None)
    }

    /// Reads the next block; false at the end.
    fn read_block(&mut self) -> io::Result<bool> {
        loop {
            let is_last = self.at.segment >= self.end.segment;
            if self.file.is_none() {
                let written = current_end(&self.written, self.end);
                self.file = self.files.open(self.at.segment, written)?;
            }
            if let Some(file) = &self.file {
                let left = if is_last {
                    self.end.length.saturating_sub(self.at.offset)
                } else {
                    LOG_READ_SIZE
                };
                self.block.resize(
                    usize::try_from(left.min(LOG_READ_SIZE)).unwrap_or_default(),
                    0,
                );
                let read = file.read_at(&mut self.block, self.at.offset)?;
                self.block.truncate(read);
                self.at.offset += read as u64;
                if read > 0 {
                    return Ok(true);
                }
            }
            if is_last {
                return Ok(false);
            }
            // The end of this file, or it was removed by rotation.
            self.file = None;
            self.at = ReadPosition {
                segment: self.at.segment + 1,
                offset: 0,
            };
        }
    }

    /// Waits until more is written; false if the log is complete or not followed.
    async fn wait_for_more(&mut self) -> bool {
        let Some(written) = self.written.as_mut().filter(|_| self.follow) else {
            return false;
        };
        // Followers of idle logs need no buffer.
        self.block = Vec::new();
        written.changed().await.is_ok()
    }
}

/// How far the log is written now. `end` may be outdated, and files rotated since have other names.
fn current_end(
    written: &Option<watch::Receiver<WritePosition>>,
    end: WritePosition,
) -> WritePosition {
    written.as_ref().map_or(end, |written| *written.borrow())
}
