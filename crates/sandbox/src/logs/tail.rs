//! Where the last lines of a log begin, found from its end.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::place::{Place, Progress};
use super::record::{Output, Record};
use super::select::Wanted;

/// How much is read at once.
const BLOCK: u64 = 64 * 1024;

/// A place in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub segment: u64,
    pub offset: u64,
}

/// Where the last `lines` lines of the log before `end` begin, of those that are wanted. `now` tells how far it is written
/// meanwhile.
pub(super) async fn start(
    place: &Place,
    oldest: u64,
    end: Progress,
    now: impl Fn() -> Progress,
    lines: u64,
    wanted: &Wanted,
) -> io::Result<Position> {
    if lines == 0 {
        return Ok(Position {
            segment: end.segment,
            offset: end.length,
        });
    }
    let mut count = Count {
        left: lines,
        seen: [false; 2],
        wanted,
    };
    for segment in (oldest..=end.segment).rev() {
        // What is gone was older than what is there.
        let Some(file) = place.open(segment, now())? else {
            continue;
        };
        let length = if segment == end.segment {
            end.length
        } else {
            file.metadata()?.len()
        };
        if let Some(offset) = start_in(&file, length, &mut count).await? {
            return Ok(Position { segment, offset });
        }
    }
    Ok(Position {
        segment: oldest,
        offset: 0,
    })
}

/// Where the last lines begin in this file, unless it has too few.
async fn start_in(file: &File, length: u64, count: &mut Count<'_>) -> io::Result<Option<u64>> {
    let mut from = length;
    // The end of a record that begins before `from`, without its line feed.
    let mut rest = Vec::new();
    while from > 0 {
        let until = from;
        from = until.saturating_sub(BLOCK);
        let mut block = vec![0; usize::try_from(until - from).unwrap_or_default()];
        file.read_exact_at(&mut block, from)?;
        if until == length && block.last() == Some(&b'\n') {
            block.pop();
        }
        block.append(&mut rest);
        let mut end = block.len();
        while let Some(before) = memchr::memrchr(b'\n', &block[..end]) {
            if count.is_one_too_many(&block[before + 1..end]) {
                return Ok(Some(from + end as u64 + 1));
            }
            end = before;
        }
        block.truncate(end);
        if from == 0 && count.is_one_too_many(&block) {
            return Ok(Some(end as u64 + 1));
        }
        rest = block;
        tokio::task::yield_now().await;
    }
    Ok(None)
}

/// Counts lines backwards.
struct Count<'a> {
    left: u64,
    /// By output: there was a record of it already.
    seen: [bool; 2],
    wanted: &'a Wanted,
}

impl Count<'_> {
    /// Whether this record belongs to a line before those that are asked for.
    fn is_one_too_many(&mut self, line: &[u8]) -> bool {
        let Some(record) = Record::parse(line) else {
            return false;
        };
        if !self.wanted.takes(record.output) {
            return false;
        }
        let seen = &mut self.seen[match record.output {
            Output::Stdout => 0,
            Output::Stderr => 1,
        }];
        // A record that ends a line is the last of one; and so is the last of all, whether it ends its line or not.
        let ends_line = record.full || !*seen;
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
