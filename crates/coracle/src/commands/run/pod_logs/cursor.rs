//! The position in a container's log, by the times of its lines.
//!
//! The API has no offsets: a reader resumes with `sinceTime`, which has a precision of one second. So it gets lines again that it has
//! read, and skips them by their exact times.
//!
//! Nor does the API name runs of a container: if it restarts, a request for its newest log may already return that of the next run. Then
//! lines of the run before are missing between the cursor and the first line of the response. The cursor remembers such gaps, and
//! reading the previous log fills them.

use std::collections::VecDeque;

use k8s_openapi::jiff::Timestamp;

/// The end of what was read of a container's log.
#[derive(Debug, Clone, Default)]
pub struct LogCursor {
    /// The latest time of a line, as the kubelet wrote it: of fixed width, so that texts compare like times.
    latest: Option<String>,
    /// The number of lines with that time.
    lines_at_latest: usize,
    /// Times between the end of one response and the first line of the next.
    gaps: VecDeque<Gap>,
    /// The cursor at the start of a response of which no line was read yet.
    response_start: Option<Option<String>>,
}

/// Between two times, exclusively; from the beginning if the first is `None`.
#[derive(Debug, Clone)]
struct Gap(Option<String>, String);

impl Gap {
    fn contains(&self, time: &str) -> bool {
        self.0.as_deref().is_none_or(|start| start < time) && time < self.1.as_str()
    }
}

impl LogCursor {
    /// Limit on remembered gaps. Only those since the last restart matter.
    const MAX_GAPS: usize = 16;

    /// The time from which to request the newest or previous log: a complete second, because clients may round others up.
    pub fn since(&self, is_previous: bool) -> Option<Timestamp> {
        let start = match self.gaps.front() {
            Some(Gap(start, _)) if is_previous => start,
            _ => &self.latest,
        };
        let time: Timestamp = start.as_ref()?.parse().ok()?;
        Timestamp::from_second(time.as_second()).ok()
    }

    /// Counts a complete line as read.
    pub fn advance(&mut self, time: &str) {
        let is_later = self.latest.as_deref().is_none_or(|latest| time > latest);
        if let Some(start) = self.response_start.take()
            && is_later
        {
            self.gaps.push_back(Gap(start, time.to_owned()));
            if self.gaps.len() > Self::MAX_GAPS {
                self.gaps.pop_front();
            }
        }
        if is_later {
            self.latest = Some(time.to_owned());
            self.lines_at_latest = 1;
        } else if self.latest.as_deref() == Some(time) {
            self.lines_at_latest += 1;
        }
    }

    /// Begins to read the newest or the previous log.
    pub fn resume(&mut self, is_previous: bool) -> OverlapFilter {
        self.response_start = (!is_previous).then(|| self.latest.clone());
        OverlapFilter {
            latest: self.latest.clone(),
            skip_at_latest: self.lines_at_latest,
            gaps: if is_previous {
                self.gaps.iter().cloned().collect()
            } else {
                Vec::new()
            },
        }
    }

    /// The previous log was read completely.
    pub fn fill_gaps(&mut self) {
        self.gaps.clear();
    }
}

/// Skips the lines of a new stream that an earlier one contained.
#[derive(Debug)]
pub struct OverlapFilter {
    /// `None` behind the overlap.
    latest: Option<String>,
    skip_at_latest: usize,
    gaps: Vec<Gap>,
}

impl OverlapFilter {
    /// Whether the line with this time is new. Behind the first new line all lines are, even if the node's clock was set back.
    pub fn is_new(&mut self, time: &str) -> bool {
        match self.latest.as_deref() {
            Some(latest) if time < latest => self.gaps.iter().any(|gap| gap.contains(time)),
            Some(latest) if time == latest && self.skip_at_latest > 0 => {
                self.skip_at_latest -= 1;
                false
            }
            _ => {
                self.latest = None;
                true
            }
        }
    }
}

/// Splits a line of a log with time stamps. `None` for a line without one, which the API server may insert.
pub fn split_time(line: &[u8]) -> Option<(&str, &[u8])> {
    let end = line.iter().position(|&byte| byte == b' ')?;
    let time = std::str::from_utf8(&line[..end]).ok()?;
    let _: Timestamp = time.parse().ok()?;
    Some((time, &line[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(nanoseconds: u32) -> String {
        format!("2026-01-01T00:00:01.{nanoseconds:09}Z")
    }

    /// Reads `lines` of a log from the beginning of the second, as after a reconnect; returns the indices of new lines.
    fn read(cursor: &mut LogCursor, lines: &[u32]) -> Vec<usize> {
        let mut overlap = cursor.resume(false);
        let mut new = Vec::new();
        for (index, &nanoseconds) in lines.iter().enumerate() {
            if overlap.is_new(&time(nanoseconds)) {
                cursor.advance(&time(nanoseconds));
                new.push(index);
            }
        }
        new
    }

    #[test]
    fn reconnect_at_any_line_neither_repeats_nor_loses_lines() {
        // Lines that were written at once have the same time.
        let log = [1, 2, 2, 2, 3, 7, 7, 9];
        for first in 0..=log.len() {
            for second in first..=log.len() {
                let mut cursor = LogCursor::default();
                let mut lines = read(&mut cursor, &log[..first]);
                lines.extend(read(&mut cursor, &log[..second]));
                lines.extend(read(&mut cursor, &log));
                assert_eq!(lines, (0..log.len()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn lines_before_an_unnoticed_restart_are_read_later() {
        // The first run wrote lines at 1 to 3. The second was read in its place, after line 1 or none.
        for known in [0, 1] {
            let mut cursor = LogCursor::default();
            assert_eq!(read(&mut cursor, &[1, 2, 3][..known]).len(), known);
            assert_eq!(read(&mut cursor, &[5, 6]), [0, 1]);
            assert_eq!(read(&mut cursor, &[5, 6, 7]), [2]);
            assert_eq!(cursor.since(true), None);
            let mut previous = cursor.resume(true);
            let new = [1, 2, 3].map(|line| previous.is_new(&time(line)));
            assert_eq!(new, [known == 0, true, true]);
            cursor.fill_gaps();
            let mut previous = cursor.resume(true);
            assert!(!previous.is_new(&time(2)));
        }
    }

    #[test]
    fn clock_set_back_loses_no_lines_of_one_stream() {
        assert_eq!(read(&mut LogCursor::default(), &[5, 6, 1, 2]), [0, 1, 2, 3]);
    }

    #[test]
    fn time_is_split_off() {
        let line = format!("{} a text", time(5));
        assert_eq!(
            split_time(line.as_bytes()),
            Some((time(5).as_str(), &b"a text"[..]))
        );
        assert_eq!(split_time(b"no time"), None);
        assert_eq!(split_time(b""), None);
        let mut cursor = LogCursor::default();
        assert_eq!(cursor.since(false), None);
        cursor.advance(&time(999_999_999));
        assert_eq!(cursor.since(false), Some(time(0).parse().unwrap()));
    }
}
