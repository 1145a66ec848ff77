//! Finds the start of the last lines of a log, backwards from its end.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::files::{LogFiles, WritePosition};
use super::filter::LogFilter;
use super::record::{LogRecord, OutputStream};

/// How much is read at a time.
const TAIL_READ_SIZE: u64 = 64 * 1024;

/// Where a reader is in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadPosition {
    pub segment: u64,
    pub offset: u64,
}

/// Finds the start of the last `lines` lines before `end` that `filter` includes. `current_end` returns how far the log is written
/// now, which determines the names of its files.
pub(super) async fn find_start(
    files: &LogFiles,
    oldest: u64,
    end: WritePosition,
    current_end: impl Fn() -> WritePosition,
    lines: u64,
    filter: &LogFilter,
) -> io::Result<ReadPosition> {
    if lines == 0 {
        return Ok(ReadPosition {
            segment: end.segment,
            offset: end.length,
        });
    }
    let mut counter = LineCounter {
        left: lines,
        seen: [false; 2],
        filter,
    };
    for segment in (oldest..=end.segment).rev() {
        // Removed by rotation.
        let Some(file) = files.open(segment, current_end())? else {
            continue;
        };
        let length = if segment == end.segment {
            end.length
        } else {
            file.metadata()?.len()
        };
        if let Some(offset) = find_start_in(&file, length, &mut counter).await? {
            return Ok(ReadPosition { segment, offset });
        }
    }
    Ok(ReadPosition {
        segment: oldest,
        offset: 0,
    })
}

/// Finds the start in this file; `None` if it has too few lines.
async fn find_start_in(
    file: &File,
    length: u64,
    counter: &mut LineCounter<'_>,
) -> io::Result<Option<u64>> {
    let mut from = length;
    // The end of a record that begins before `from`, without its line feed.
    let mut rest = Vec::new();
    while from > 0 {
        let until = from;
        from = until.saturating_sub(TAIL_READ_SIZE);
        let mut block = vec![0; usize::try_from(until - from).unwrap_or_default()];
        file.read_exact_at(&mut block, from)?;
        if until == length && block.last() == Some(&b'\n') {
            block.pop();
        }
        block.append(&mut rest);
        let mut end = block.len();
        while let Some(before) = memchr::memrchr(b'\n', &block[..end]) {
            if counter.exceeds(&block[before + 1..end]) {
                return Ok(Some(from + end as u64 + 1));
            }
            end = before;
        }
        block.truncate(end);
        if from == 0 && counter.exceeds(&block) {
            return Ok(Some(end as u64 + 1));
        }
        rest = block;
        tokio::task::yield_now().await;
    }
    Ok(None)
}

/// Counts lines backwards.
struct LineCounter<'a> {
    left: u64,
    /// By stream: a record of it was counted already.
    seen: [bool; 2],
    filter: &'a LogFilter,
}

impl LineCounter<'_> {
    /// Counts a record; true if it belongs to a line before the requested ones.
    fn exceeds(&mut self, line: &[u8]) -> bool {
        let Some(record) = LogRecord::parse(line) else {
            return false;
        };
        if !self.filter.includes(record.stream) {
            return false;
        }
        let seen = &mut self.seen[match record.stream {
            OutputStream::Stdout => 0,
            OutputStream::Stderr => 1,
        }];
        // The last record of a stream is the end of a line even without the tag `F`.
        let ends_line = record.ends_line || !*seen;
        *seen = true;
        if !ends_line {
            return false;
        }
        if self.left == 0 {
            return true;
        }
        self.left -= 1;
        false
    }
}
