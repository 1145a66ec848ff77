//! What of a log is shown: records in, a container's output out.

use jiff::Timestamp;

use super::record::{self, Output, Record};
use pod_protocol::{LogQuery, Problem};

/// How long a line of a log file may be before it is none of ours: a record, its header, and then some.
const LONGEST_LINE: usize = 64 * 1024;

/// Which records, and how they are shown.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    pub output: Option<Output>,
    /// In the format of records.
    pub since: Option<String>,
    pub timestamps: bool,
    pub limit: Option<u64>,
}

impl Wanted {
    pub(super) fn of(query: &LogQuery) -> Result<Self, Problem> {
        let bad = |message| Problem {
            reason: "BadRequest".to_owned(),
            message,
        };
        let output = match query.stream.as_deref() {
            None | Some("All") => None,
            Some("Stdout") => Some(Output::Stdout),
            Some("Stderr") => Some(Output::Stderr),
            Some(other) => return Err(bad(format!("invalid stream type {other:?}"))),
        };
        let since = match &query.since {
            None => None,
            Some(since) => {
                let at: Timestamp = since
                    .parse()
                    .map_err(|error| bad(format!("invalid time {since:?}: {error}")))?;
                Some(record::time(at))
            }
        };
        Ok(Self {
            output,
            since,
            timestamps: query.timestamps,
            limit: query.limit_bytes,
        })
    }

    pub(super) fn takes(&self, output: Output) -> bool {
        self.output.is_none_or(|wanted| wanted == output)
    }
}

/// Turns the bytes of a log file into what its reader sees.
#[derive(Debug)]
pub(super) struct Selection {
    wanted: Wanted,
    left: u64,
    /// What was shown last ended a line.
    at_line_start: bool,
    /// The beginning of a record.
    begun: Vec<u8>,
    /// Amidst a line that is too long to be a record.
    skipping: bool,
}

impl Selection {
    pub(super) fn new(wanted: Wanted) -> Self {
        Self {
            left: wanted.limit.unwrap_or(u64::MAX),
            wanted,
            at_line_start: true,
            begun: Vec::new(),
            skipping: false,
        }
    }

    /// As much was shown as may be.
    pub(super) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Takes the next bytes of the file, and adds what they show.
    pub(super) fn push(&mut self, bytes: &[u8], shown: &mut Vec<u8>) {
        let mut rest = bytes;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            let line = &rest[..end];
            rest = &rest[end + 1..];
            if std::mem::take(&mut self.skipping) {
                continue;
            }
            if self.begun.is_empty() {
                self.show(line, false, shown);
            } else {
                let mut whole = std::mem::take(&mut self.begun);
                whole.extend_from_slice(line);
                self.show(&whole, false, shown);
            }
            if self.is_done() {
                return;
            }
        }
        if self.begun.len() + rest.len() > LONGEST_LINE {
            self.begun = Vec::new();
            self.skipping = true;
        } else if !self.skipping {
            self.begun.extend_from_slice(rest);
        }
    }

    /// The file has ended, and nobody will add to it: a record that was torn is shown as far as it goes.
    pub(super) fn finish(&mut self, shown: &mut Vec<u8>) {
        let torn = std::mem::take(&mut self.begun);
        self.skipping = false;
        self.show(&torn, true, shown);
    }

    fn show(&mut self, line: &[u8], torn: bool, shown: &mut Vec<u8>) {
        let Some(record) = Record::parse(line) else {
            return;
        };
        let early = |since: &String| record.time < since.as_bytes();
        if !self.wanted.takes(record.output) || self.wanted.since.as_ref().is_some_and(early) {
            return;
        }
        if self.wanted.timestamps && self.at_line_start {
            self.put(record.time, shown);
            self.put(b" ", shown);
        }
        self.put(record.content, shown);
        let ends = record.full && !torn;
        if ends {
            self.put(b"\n", shown);
        }
        self.at_line_start = ends;
    }

    fn put(&mut self, bytes: &[u8], shown: &mut Vec<u8>) {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(room)];
        self.left -= bytes.len() as u64;
        shown.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::Splitter;
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:01.000000000Z stdout F one
2026-01-01T00:00:02.000000000Z stderr F two
this is no record
2026-01-01T00:00:03.000000000Z stdout P thr
2026-01-01T00:00:04.000000000Z stdout F ee
2026-01-01T00:00:05.000000000Z stdout P en";

    fn shown(query: LogQuery, chunk: usize) -> String {
        let mut selection = Selection::new(Wanted::of(&query).unwrap());
        let mut shown = Vec::new();
        for chunk in LOG.as_bytes().chunks(chunk) {
            if !selection.is_done() {
                selection.push(chunk, &mut shown);
            }
        }
        selection.finish(&mut shown);
        String::from_utf8(shown).unwrap()
    }

    fn all() -> LogQuery {
        LogQuery::default()
    }

    proptest! {
        #[test]
        fn a_log_is_shown_as_asked(chunk in 1..300_usize) {
            prop_assert_eq!(shown(all(), chunk), "one\ntwo\nthree\nen");

            let stream = Some("Stderr".to_owned());
            prop_assert_eq!(shown(LogQuery { stream, ..all() }, chunk), "two\n");

            let since = Some("2026-01-01T01:00:02.5+01:00".to_owned());
            prop_assert_eq!(shown(LogQuery { since, ..all() }, chunk), "three\nen");

            let limit_bytes = Some(6);
            prop_assert_eq!(shown(LogQuery { limit_bytes, ..all() }, chunk), "one\ntw");

            let stamped = shown(LogQuery { timestamps: true, ..all() }, chunk);
            prop_assert_eq!(stamped, "\
2026-01-01T00:00:01.000000000Z one
2026-01-01T00:00:02.000000000Z two
2026-01-01T00:00:03.000000000Z three
2026-01-01T00:00:05.000000000Z en");
        }

        #[test]
        fn what_was_written_is_shown(
            chunks in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..50),
                    prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'x')], 0..50),
                    (0..40_000_usize).prop_map(|length| vec![b'l'; length]),
                ],
                0..12,
            ),
            enough in 1..100_000_usize,
            piece in 1..100_000_usize,
        ) {
            let mut splitter = Splitter::new(Output::Stderr);
            let mut file = Vec::new();
            for chunk in &chunks {
                let mut rest = chunk.as_slice();
                while !rest.is_empty() {
                    let mut records = Vec::new();
                    let taken = splitter.push(rest, "T", &mut records, enough);
                    rest = &rest[taken..];
                    file.extend(records);
                }
            }
            splitter.finish("T", &mut file);
            prop_assert!(file.split(|byte| *byte == b'\n').all(|line| line.len() < record::LONGEST_CONTENT + 50));

            let mut selection = Selection::new(Wanted::default());
            let mut shown = Vec::new();
            for piece in file.chunks(piece) {
                selection.push(piece, &mut shown);
            }
            selection.finish(&mut shown);
            prop_assert!(shown == chunks.concat());
        }

        #[test]
        fn garbage_is_left_out_at_most(file: Vec<u8>, piece in 1..99_usize, timestamps: bool, limit: Option<u64>) {
            let wanted = Wanted { timestamps, limit, ..Wanted::default() };
            let mut selection = Selection::new(wanted);
            let mut shown = Vec::new();
            for piece in file.chunks(piece) {
                selection.push(piece, &mut shown);
            }
            selection.finish(&mut shown);
            prop_assert!(shown.len() <= file.len());
        }
    }

    #[test]
    fn a_line_without_end_is_passed_over() {
        let mut selection = Selection::new(Wanted::default());
        let mut shown = Vec::new();
        for _ in 0..100 {
            selection.push(&[b'g'; 5000], &mut shown);
            assert!(selection.begun.len() <= LONGEST_LINE);
        }
        selection.push(b"rest\nT stdout F sense\n", &mut shown);
        assert_eq!(shown, b"sense\n");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for query in [
            LogQuery {
                stream: Some("stdin".to_owned()),
                ..all()
            },
            LogQuery {
                since: Some("yesterday".to_owned()),
                ..all()
            },
        ] {
            assert_eq!(Wanted::of(&query).unwrap_err().reason, "BadRequest");
        }
    }
}
