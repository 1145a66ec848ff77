//! From a log to whoever asked for it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use tokio::sync::watch;

use super::place::{Place, Progress};
use super::select::{Selection, Wanted};
use super::tail::{self, Position};

/// How much is read at once.
const BLOCK: u64 = 64 * 1024;

/// A log that is being read.
#[derive(Debug)]
pub(super) struct Reading {
    place: Place,
    selection: Selection,
    at: Position,
    file: Option<File>,
    /// How far there is something to read.
    end: Progress,
    /// Tells how far the log is written, and so by which names its files go, while it is written.
    written: Option<watch::Receiver<Progress>>,
    /// What is written later is waited for.
    follow: bool,
    block: Vec<u8>,
    over: bool,
}

impl Reading {
    /// Begins to read; `written` is there while the log is being written.
    pub(super) async fn start(
        place: Place,
        written: Option<watch::Receiver<Progress>>,
        follow: bool,
        tail: Option<u64>,
        wanted: Wanted,
    ) -> io::Result<Self> {
        let (oldest, found) = place.survey()?;
        // The writer knows better: the file may end in what it could not finish.
        let end = written
            .as_ref()
            .map_or(found, |progress| *progress.borrow());
        let at = match tail {
            None => Position {
                segment: oldest,
                offset: 0,
            },
            Some(lines) => {
                let now = || now(&written, end);
                tail::start(&place, oldest, end, now, lines, &wanted).await?
            }
        };
        let selection = Selection::new(wanted);
        Ok(Self {
            place,
            over: selection.is_done(),
            selection,
            at,
            file: None,
            end,
            follow: follow && written.is_some(),
            written,
            block: Vec::new(),
        })
    }

    /// What comes next, waiting for it if the log is followed; `None` at its end.
    pub(super) async fn next(mut self) -> io::Result<Option<(Bytes, Self)>> {
        while !self.over {
            let mut shown = Vec::new();
            if let Some(written) = self.written.as_mut().filter(|_| self.follow) {
                self.end = *written.borrow_and_update();
            }
            if self.read_block()? {
                // Never more than was read, but for what of a record was read before.
                shown.reserve(self.block.len());
                self.selection.push(&self.block, &mut shown);
                self.over = self.selection.is_done();
            } else if !self.wait().await {
                self.selection.finish(&mut shown);
                self.over = true;
            }
            if !shown.is_empty() {
                return Ok(Some((shown.into(), self)));
            }
            // Nothing of it was wanted. Others want to go on too.
            tokio::task::yield_now().await;
        }
        Ok(None)
    }

    /// Reads on; false if all that is written was read.
    fn read_block(&mut self) -> io::Result<bool> {
        loop {
            let last = self.at.segment >= self.end.segment;
            if self.file.is_none() {
                let now = now(&self.written, self.end);
                self.file = self.place.open(self.at.segment, now)?;
            }
            if let Some(file) = &self.file {
                let left = if last {
                    self.end.length.saturating_sub(self.at.offset)
                } else {
                    BLOCK
                };
                self.block
                    .resize(usize::try_from(left.min(BLOCK)).unwrap_or_default(), 0);
                let read = file.read_at(&mut self.block, self.at.offset)?;
                self.block.truncate(read);
                self.at.offset += read as u64;
                if read > 0 {
                    return Ok(true);
                }
            }
            if last {
                return Ok(false);
            }
            // The end of this one, or it was too old to be kept.
            self.file = None;
            self.at = Position {
                segment: self.at.segment + 1,
                offset: 0,
            };
        }
    }

    /// Waits until more is written; false if that will never be, or is not waited for.
    async fn wait(&mut self) -> bool {
        let Some(written) = self.written.as_mut().filter(|_| self.follow) else {
            return false;
        };
        // Many follow logs in which nothing happens.
        self.block = Vec::new();
        written.changed().await.is_ok()
    }
}

/// How far the log is written by now. Files that were full meanwhile have other names.
fn now(written: &Option<watch::Receiver<Progress>>, end: Progress) -> Progress {
    written.as_ref().map_or(end, |written| *written.borrow())
}
