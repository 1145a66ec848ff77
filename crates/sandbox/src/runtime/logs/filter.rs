//! Decodes and filters the records of a log into a container's output.

use jiff::Timestamp;
use pod_protocol::{LogQuery, LogSource, RequestError};

use super::record::{self, LogRecord, OutputStream};

/// Longer lines of a log file are no records and are skipped. More than the longest record with its header.
const MAX_LOG_LINE: usize = 64 * 1024;

/// Selects records, and how they are printed.
#[derive(Clone, Debug, Default)]
pub(super) struct LogFilter {
    pub stream: Option<OutputStream>,
    /// In the format of a record's time.
    pub since: Option<String>,
    pub timestamps: bool,
    pub limit_bytes: Option<u64>,
}

impl LogFilter {
    pub(super) fn new(query: &LogQuery) -> Result<Self, RequestError> {
        let bad_request = |message: String| RequestError::bad_request(message);
        let stream = match query.stream {
            LogSource::All => None,
            LogSource::Stdout => Some(OutputStream::Stdout),
            LogSource::Stderr => Some(OutputStream::Stderr),
        };
        let since = match &query.since {
            None => None,
            Some(since) => {
                let at: Timestamp = since
                    .parse()
                    .map_err(|error| bad_request(format!("invalid time {since:?}: {error}")))?;
                Some(record::time(at))
            }
        };
        Ok(Self {
            stream,
            since,
            timestamps: query.timestamps,
            limit_bytes: query.limit_bytes,
        })
    }

    pub(super) fn includes(&self, stream: OutputStream) -> bool {
        self.stream.is_none_or(|wanted| wanted == stream)
    }
}

/// Turns the bytes of a log file into the container's output.
#[derive(Debug)]
pub(super) struct FilteredOutput {
    filter: LogFilter,
    /// Bytes left until the limit.
    left: u64,
    at_line_start: bool,
    /// The start of an incomplete record.
    partial: Vec<u8>,
    /// Inside a line that is too long to be a record.
    is_skipping: bool,
}

impl FilteredOutput {
    pub(super) fn new(filter: LogFilter) -> Self {
        Self {
            left: filter.limit_bytes.unwrap_or(u64::MAX),
            filter,
            at_line_start: true,
            partial: Vec::new(),
            is_skipping: false,
        }
    }

    /// Whether the limit is reached.
    pub(super) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Decodes the next bytes of the file and appends the output to `out`.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut rest = bytes;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            let line = &rest[..end];
            rest = &rest[end + 1..];
            if std::mem::take(&mut self.is_skipping) {
                continue;
            }
            if self.partial.is_empty() {
                self.print(line, false, out);
            } else {
                let mut joined = std::mem::take(&mut self.partial);
                joined.extend_from_slice(line);
                self.print(&joined, false, out);
            }
            if self.is_done() {
                return;
            }
        }
        if self.partial.len() + rest.len() > MAX_LOG_LINE {
            self.partial = Vec::new();
            self.is_skipping = true;
        } else if !self.is_skipping {
            self.partial.extend_from_slice(rest);
        }
    }

    /// At the end of a complete log, appends the content of a truncated last record.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        let truncated = std::mem::take(&mut self.partial);
        self.is_skipping = false;
        self.print(&truncated, true, out);
    }

    fn print(&mut self, line: &[u8], is_truncated: bool, out: &mut Vec<u8>) {
        let Some(record) = LogRecord::parse(line) else {
            return;
        };
        let is_earlier = |since: &String| record.time < since.as_bytes();
        if !self.filter.includes(record.stream)
            || self.filter.since.as_ref().is_some_and(is_earlier)
        {
            return;
        }
        if self.filter.timestamps && self.at_line_start {
            self.put(record.time, out);
            self.put(b" ", out);
        }
        self.put(record.content, out);
        let ends_line = record.ends_line && !is_truncated;
        if ends_line {
            self.put(b"\n", out);
        }
        self.at_line_start = ends_line;
    }

    fn put(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(room)];
        self.left -= bytes.len() as u64;
        out.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::RecordEncoder;
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:01.000000000Z stdout F one
2026-01-01T00:00:02.000000000Z stderr F two
this is not a record
2026-01-01T00:00:03.000000000Z stdout P thr
2026-01-01T00:00:04.000000000Z stdout F ee
2026-01-01T00:00:05.000000000Z stdout P en";

    fn filtered(query: LogQuery, chunk: usize) -> String {
        let mut output = FilteredOutput::new(LogFilter::new(&query).unwrap());
        let mut out = Vec::new();
        for chunk in LOG.as_bytes().chunks(chunk) {
            if !output.is_done() {
                output.push(chunk, &mut out);
            }
        }
        output.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn all() -> LogQuery {
        LogQuery::default()
    }

    proptest! {
        #[test]
        fn query_filters_log(chunk in 1..300_usize) {
            prop_assert_eq!(filtered(all(), chunk), "one\ntwo\nthree\nen");

            let stream = LogSource::Stderr;
            prop_assert_eq!(filtered(LogQuery { stream, ..all() }, chunk), "two\n");

            let since = Some("2026-01-01T01:00:02.5+01:00".to_owned());
            prop_assert_eq!(filtered(LogQuery { since, ..all() }, chunk), "three\nen");

            let limit_bytes = Some(6);
            prop_assert_eq!(filtered(LogQuery { limit_bytes, ..all() }, chunk), "one\ntw");

            let stamped = filtered(LogQuery { timestamps: true, ..all() }, chunk);
            prop_assert_eq!(stamped, "\
2026-01-01T00:00:01.000000000Z one
2026-01-01T00:00:02.000000000Z two
2026-01-01T00:00:03.000000000Z three
2026-01-01T00:00:05.000000000Z en");
        }

        #[test]
        fn encoded_output_is_decoded(
            chunks in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..50),
                    prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'x')], 0..50),
                    (0..40_000_usize).prop_map(|length| vec![b'l'; length]),
                ],
                0..12,
            ),
            max_bytes in 1..100_000_usize,
            piece in 1..100_000_usize,
        ) {
            let mut encoder = RecordEncoder::new(OutputStream::Stderr);
            let mut file = Vec::new();
            for chunk in &chunks {
                let mut rest = chunk.as_slice();
                while !rest.is_empty() {
                    let mut records = Vec::new();
                    let taken = encoder.push(rest, "T", &mut records, max_bytes);
                    rest = &rest[taken..];
                    file.extend(records);
                }
            }
            encoder.finish("T", &mut file);
            prop_assert!(file.split(|byte| *byte == b'\n').all(|line| line.len() < record::MAX_CONTENT + 50));

            let mut output = FilteredOutput::new(LogFilter::default());
            let mut out = Vec::new();
            for piece in file.chunks(piece) {
                output.push(piece, &mut out);
            }
            output.finish(&mut out);
            prop_assert!(out == chunks.concat());
        }

        #[test]
        fn output_is_never_longer_than_file(file: Vec<u8>, piece in 1..99_usize, timestamps: bool, limit_bytes: Option<u64>) {
            let filter = LogFilter { timestamps, limit_bytes, ..LogFilter::default() };
            let mut output = FilteredOutput::new(filter);
            let mut out = Vec::new();
            for piece in file.chunks(piece) {
                output.push(piece, &mut out);
            }
            output.finish(&mut out);
            prop_assert!(out.len() <= file.len());
        }
    }

    #[test]
    fn endless_line_is_skipped() {
        let mut output = FilteredOutput::new(LogFilter::default());
        let mut out = Vec::new();
        for _ in 0..100 {
            output.push(&[b'g'; 5000], &mut out);
            assert!(output.partial.len() <= MAX_LOG_LINE);
        }
        output.push(b"rest\nT stdout F sense\n", &mut out);
        assert_eq!(out, b"sense\n");
    }

    #[test]
    fn invalid_query_is_bad_request() {
        let query = LogQuery {
            since: Some("yesterday".to_owned()),
            ..all()
        };
        let error = LogFilter::new(&query).unwrap_err();
        assert_eq!(error.kind, pod_protocol::RequestErrorKind::BadRequest);
    }
}
