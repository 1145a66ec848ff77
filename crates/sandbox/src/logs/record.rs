//! One record of a log, in the format of the CRI: `2016-10-06T00:17:09.669794202Z stdout F a line`.

use std::time::SystemTime;

use jiff::Timestamp;

/// How much of a line one record holds, as with upstream's runtimes; longer lines are several records.
pub(super) const LONGEST_CONTENT: usize = 16 * 1024;

/// Which output of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    Stdout,
    Stderr,
}

impl Output {
    fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// A record that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    /// When it was written. All of ours are equally long and of one time zone, so they compare as bytes.
    pub time: &'a [u8],
    pub output: Output,
    /// It ends a line; else the line goes on in the next record of this output.
    pub full: bool,
    pub content: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads a line of a log file, without its line feed; `None` if it is no record.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let (time, rest) = word(line)?;
        let (output, rest) = word(rest)?;
        let (tags, content) = word(rest)?;
        let output = match output {
            b"stdout" => Output::Stdout,
            b"stderr" => Output::Stderr,
            _ => return None,
        };
        // Further tags may follow after a colon.
        let full = match tags.split(|byte| *byte == b':').next()? {
            b"F" => true,
            b"P" => false,
            _ => return None,
        };
        Some(Self {
            time,
            output,
            full,
            content,
        })
    }
}

fn word(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    // The words are short; a byte-wise search beats a vectorised one.
    let end = bytes.iter().position(|byte| *byte == b' ')?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

/// A time as records have it.
pub(super) fn time(at: Timestamp) -> String {
    format!("{at:.9}")
}

/// The time of records that are written now. Never earlier than `last`, for a clock may be set back.
pub(super) fn now(last: &str) -> String {
    let now = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH);
    let now = time(now);
    if now.as_str() < last {
        return last.to_owned();
    }
    now
}

/// Turns the bytes of one output into records.
#[derive(Debug)]
pub(super) struct Splitter {
    output: Output,
    /// The beginning of a line, not longer than a record.
    begun: Vec<u8>,
}

impl Splitter {
    pub(super) fn new(output: Output) -> Self {
        Self {
            output,
            begun: Vec::new(),
        }
    }

    /// Puts what was written at `time` into records, until `records` is `enough` long; says how much it took.
    pub(super) fn push(
        &mut self,
        bytes: &[u8],
        time: &str,
        records: &mut Vec<u8>,
        enough: usize,
    ) -> usize {
        let full = header(time, self.output, "F");
        let mut rest = bytes;
        while !rest.is_empty() && records.len() < enough {
            // A line feed right after the longest content still belongs to it.
            let room = LONGEST_CONTENT - self.begun.len();
            let seen = &rest[..rest.len().min(room + 1)];
            let (head, content) = match memchr::memchr(b'\n', seen) {
                Some(end) => (full.as_str(), end),
                None if rest.len() > room => ("", room),
                None => {
                    self.begun.extend_from_slice(rest);
                    return bytes.len();
                }
            };
            let partial;
            let (head, eaten) = if head.is_empty() {
                partial = header(time, self.output, "P");
                (partial.as_str(), content)
            } else {
                (head, content + 1)
            };
            records.extend_from_slice(head.as_bytes());
            if !self.begun.is_empty() {
                // Given back rather than kept: most containers are silent most of the time.
                records.extend_from_slice(&std::mem::take(&mut self.begun));
            }
            records.extend_from_slice(&rest[..content]);
            records.push(b'\n');
            rest = &rest[eaten..];
        }
        bytes.len() - rest.len()
    }

    /// The output has ended: what it said last, though no line feed came.
    pub(super) fn finish(&mut self, time: &str, records: &mut Vec<u8>) {
        if self.begun.is_empty() {
            return;
        }
        records.extend_from_slice(header(time, self.output, "P").as_bytes());
        records.extend_from_slice(&std::mem::take(&mut self.begun));
        records.push(b'\n');
    }
}

/// A record of ours about the log itself.
pub(super) fn note(time: &str, text: &str) -> Vec<u8> {
    let head = header(time, Output::Stderr, "F");
    format!("{head}coracle: {text}\n").into_bytes()
}

fn header(time: &str, output: Output, tag: &str) -> String {
    format!("{time} {} {tag} ", output.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<String> {
        let mut splitter = Splitter::new(Output::Stdout);
        let mut records = Vec::new();
        for chunk in chunks {
            assert_eq!(
                splitter.push(chunk, "T", &mut records, usize::MAX),
                chunk.len()
            );
        }
        splitter.finish("T", &mut records);
        let text = String::from_utf8(records).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_record_looks_as_the_cri_has_it() {
        let at = "2016-10-06T00:17:09.6697Z".parse().unwrap();
        assert_eq!(time(at), "2016-10-06T00:17:09.669700000Z");
        assert_eq!(now("").len(), 30);
        let far = "9000-01-01T00:00:00.000000000Z";
        assert_eq!(now(far), far);

        let record = Record::parse(b"2016-10-06T00:17:09.669700000Z stderr P:x  a b ").unwrap();
        assert_eq!(record.time, b"2016-10-06T00:17:09.669700000Z");
        assert_eq!((record.output, record.full), (Output::Stderr, false));
        assert_eq!(record.content, b" a b ");
    }

    #[test]
    fn lines_are_records() {
        assert_eq!(
            split(&[b"one\ntw", b"o\n\nthree"]),
            [
                "T stdout F one",
                "T stdout F two",
                "T stdout F ",
                "T stdout P three"
            ]
        );
        assert!(split(&[]).is_empty());
    }

    #[test]
    fn long_lines_are_several_records() {
        let long = vec![b'x'; LONGEST_CONTENT];
        assert_eq!(split(&[&long, b"\n"]).len(), 1);
        let records = split(&[&long, b"y", b"\n"]);
        assert!(records[0].starts_with("T stdout P xxx"));
        assert_eq!(records[1], "T stdout F y");
        let records = split(&[&[long.as_slice(), &long, b"\n"].concat()]);
        assert!(records[0].starts_with("T stdout P ") && records[1].starts_with("T stdout F "));
        assert_eq!(records.len(), 2);
    }

    #[test]
    fn enough_is_enough() {
        let mut splitter = Splitter::new(Output::Stdout);
        let mut records = Vec::new();
        assert_eq!(splitter.push(b"a\nb\nc\n", "T", &mut records, 20), 4);
        assert_eq!(records, b"T stdout F a\nT stdout F b\n");
    }

    #[test]
    fn what_is_no_record_is_none() {
        for line in [
            "",
            "x",
            "T stdout",
            "T stdout F",
            "T stdlog F x",
            "T stdout X x",
        ] {
            assert_eq!(Record::parse(line.as_bytes()), None, "{line}");
        }
    }
}
