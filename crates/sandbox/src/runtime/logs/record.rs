//! One record of a log, in the CRI's format: `2016-10-06T00:17:09.669794202Z stdout F a line`.

use std::time::SystemTime;

use jiff::Timestamp;

/// Maximum content of a record, as in containerd; longer lines are split.
pub(super) const MAX_CONTENT: usize = 16 * 1024;

/// An output stream of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputStream {
    Stdout,
    Stderr,
}

impl OutputStream {
    fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// A parsed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogRecord<'a> {
    /// All times have the same length and time zone, so they compare as bytes.
    pub time: &'a [u8],
    pub stream: OutputStream,
    /// The tag `F`; with `P` the line goes on in the stream's next record.
    pub ends_line: bool,
    pub content: &'a [u8],
}

impl<'a> LogRecord<'a> {
    /// Parses a line of a log file, without its line feed; `None` if it is no record.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let (time, rest) = field(line)?;
        let (stream, rest) = field(rest)?;
        let (tags, content) = field(rest)?;
        let stream = match stream {
            b"stdout" => OutputStream::Stdout,
            b"stderr" => OutputStream::Stderr,
            _ => return None,
        };
        // Further tags may follow after a colon.
        let ends_line = match tags.split(|byte| *byte == b':').next()? {
            b"F" => true,
            b"P" => false,
            _ => return None,
        };
        Some(Self {
            time,
            stream,
            ends_line,
            content,
        })
    }
}

/// Splits at the first space.
fn field(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    // Fields are short: a byte-wise search is faster than memchr.
    let end = bytes.iter().position(|byte| *byte == b' ')?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

/// Formats a time for a record.
pub(super) fn time(at: Timestamp) -> String {
    format!("{at:.9}")
}

/// The current time for a record. Never earlier than `last`, even if the clock is set back.
pub(super) fn now(last: &str) -> String {
    let now = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH);
    let now = time(now);
    if now.as_str() < last {
        return last.to_owned();
    }
    now
}

/// Encodes the bytes of one stream as records.
#[derive(Debug)]
pub(super) struct RecordEncoder {
    stream: OutputStream,
    /// The start of an incomplete line, at most [`MAX_CONTENT`] long.
    partial: Vec<u8>,
}

impl RecordEncoder {
    pub(super) fn new(stream: OutputStream) -> Self {
        Self {
            stream,
            partial: Vec::new(),
        }
    }

    /// Appends records with this time to `records`, until it has `max_bytes`. Returns how much of `bytes` was consumed.
    pub(super) fn push(
        &mut self,
        bytes: &[u8],
        time: &str,
        records: &mut Vec<u8>,
        max_bytes: usize,
    ) -> usize {
        let full = header(time, self.stream, "F");
        let mut rest = bytes;
        while !rest.is_empty() && records.len() < max_bytes {
            // A line feed right after content of maximum length still belongs to the record.
            let room = MAX_CONTENT - self.partial.len();
            let seen = &rest[..rest.len().min(room + 1)];
            let (head, content) = match memchr::memchr(b'\n', seen) {
                Some(end) => (full.as_str(), end),
                None if rest.len() > room => ("", room),
                None => {
                    self.partial.extend_from_slice(rest);
                    return bytes.len();
                }
            };
            let partial;
            let (head, consumed) = if head.is_empty() {
                partial = header(time, self.stream, "P");
                (partial.as_str(), content)
            } else {
                (head, content + 1)
            };
            records.extend_from_slice(head.as_bytes());
            if !self.partial.is_empty() {
                // Free the buffer: most containers are idle most of the time.
                records.extend_from_slice(&std::mem::take(&mut self.partial));
            }
            records.extend_from_slice(&rest[..content]);
            records.push(b'\n');
            rest = &rest[consumed..];
        }
        bytes.len() - rest.len()
    }

    /// Appends the last line of the stream if it has no line feed.
    pub(super) fn finish(&mut self, time: &str, records: &mut Vec<u8>) {
        if self.partial.is_empty() {
            return;
        }
        records.extend_from_slice(header(time, self.stream, "P").as_bytes());
        records.extend_from_slice(&std::mem::take(&mut self.partial));
        records.push(b'\n');
    }
}

/// A record of the runtime about the log itself.
pub(super) fn note(time: &str, text: &str) -> Vec<u8> {
    let head = header(time, OutputStream::Stderr, "F");
    format!("{head}coracle: {text}\n").into_bytes()
}

fn header(time: &str, stream: OutputStream, tag: &str) -> String {
    format!("{time} {} {tag} ", stream.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(chunks: &[&[u8]]) -> Vec<String> {
        let mut encoder = RecordEncoder::new(OutputStream::Stdout);
        let mut records = Vec::new();
        for chunk in chunks {
            assert_eq!(
                encoder.push(chunk, "T", &mut records, usize::MAX),
                chunk.len()
            );
        }
        encoder.finish("T", &mut records);
        let text = String::from_utf8(records).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn record_has_cri_format() {
        let at = "2016-10-06T00:17:09.6697Z".parse().unwrap();
        assert_eq!(time(at), "2016-10-06T00:17:09.669700000Z");
        assert_eq!(now("").len(), 30);
        let far = "9000-01-01T00:00:00.000000000Z";
        assert_eq!(now(far), far);

        let record = LogRecord::parse(b"2016-10-06T00:17:09.669700000Z stderr P:x  a b ").unwrap();
        assert_eq!(record.time, b"2016-10-06T00:17:09.669700000Z");
        assert_eq!(
            (record.stream, record.ends_line),
            (OutputStream::Stderr, false)
        );
        assert_eq!(record.content, b" a b ");
    }

    #[test]
    fn each_line_is_a_record() {
        assert_eq!(
            encode(&[b"one\ntw", b"o\n\nthree"]),
            [
                "T stdout F one",
                "T stdout F two",
                "T stdout F ",
                "T stdout P three"
            ]
        );
        assert!(encode(&[]).is_empty());
    }

    #[test]
    fn long_line_is_split() {
        let long = vec![b'x'; MAX_CONTENT];
        assert_eq!(encode(&[&long, b"\n"]).len(), 1);
        let records = encode(&[&long, b"y", b"\n"]);
        assert!(records[0].starts_with("T stdout P xxx"));
        assert_eq!(records[1], "T stdout F y");
        let records = encode(&[&[long.as_slice(), &long, b"\n"].concat()]);
        assert!(records[0].starts_with("T stdout P ") && records[1].starts_with("T stdout F "));
        assert_eq!(records.len(), 2);
    }

    #[test]
    fn encoder_stops_at_max_bytes() {
        let mut encoder = RecordEncoder::new(OutputStream::Stdout);
        let mut records = Vec::new();
        assert_eq!(encoder.push(b"a\nb\nc\n", "T", &mut records, 20), 4);
        assert_eq!(records, b"T stdout F a\nT stdout F b\n");
    }

    #[test]
    fn malformed_line_is_no_record() {
        for line in [
            "",
            "x",
            "T stdout",
            "T stdout F",
            "T stdlog F x",
            "T stdout X x",
        ] {
            assert_eq!(LogRecord::parse(line.as_bytes()), None, "{line}");
        }
    }
}
