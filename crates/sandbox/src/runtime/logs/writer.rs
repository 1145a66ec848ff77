//! Copies a container's output into its log.
//!
//! A container never blocks on its log: output that cannot be written, because the disk is full, is dropped and counted. The log gets
//! a note about it as soon as it can be written again, at the latest when the container exits. The pod gets a warning when the first
//! record is dropped, and at the end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{mpsc, watch};

use super::files::{LogFiles, WritePosition};
use super::record::{self, OutputStream, RecordEncoder};
use super::{LiveLog, LogLimits};

/// How much is read at a time: the size of a pipe's buffer.
const PIPE_READ_SIZE: usize = 64 * 1024;
/// How much is written at a time, approximately.
const LOG_WRITE_SIZE: usize = 128 * 1024;
/// How much of a log's end is searched for records to replace by a note: a few of maximum length.
const SEARCH_SIZE: u64 = 64 * 1024;

/// Writes the log of one attempt of a container. If it is dropped unused, the empty log is removed: an attempt that never started
/// must not hide the log of the one before.
#[derive(Debug)]
pub struct LogWriter {
    file: LogFile,
    is_used: bool,
    /// Time of the last record.
    time: String,
    /// Ends the logs of followers when it is dropped.
    _live: LiveLog,
}

impl LogWriter {
    pub(super) fn new(file: LogFile, live: LiveLog) -> Self {
        Self {
            file,
            is_used: false,
            time: String::new(),
            _live: live,
        }
    }

    /// Warnings about this log, for Events at the pod.
    pub fn warnings(&mut self) -> mpsc::UnboundedReceiver<String> {
        let (warn, warnings) = mpsc::unbounded_channel();
        self.file.warn = Some(warn);
        warnings
    }

    /// Copies a container's streams into the log until end-of-file of both. A container with a terminal has one stream.
    pub async fn copy(
        mut self,
        stdout: impl AsyncRead + Unpin,
        stderr: Option<impl AsyncRead + Unpin>,
    ) {
        self.is_used = true;
        let mut stdout = OutputSource::new(Some(stdout), OutputStream::Stdout);
        let mut stderr = OutputSource::new(stderr, OutputStream::Stderr);
        let mut stderr_first = false;
        loop {
            stderr_first = !stderr_first;
            let read = std::future::poll_fn(|context| {
                // Allocated for each read, so that an idle container needs no memory.
                let mut block = Vec::with_capacity(PIPE_READ_SIZE);
                let first = if stderr_first {
                    stderr.poll(context, &mut block)
                } else {
                    stdout.poll(context, &mut block)
                };
                // There is one block, so the other stream is read in the next round.
                if let Polled::Read(from) = first {
                    return Poll::Ready(Some((from, block)));
                }
                let second = if stderr_first {
                    stdout.poll(context, &mut block)
                } else {
                    stderr.poll(context, &mut block)
                };
                match (first, second) {
                    (_, Polled::Read(from)) => Poll::Ready(Some((from, block))),
                    (Polled::Ended, Polled::Ended) => Poll::Ready(None),
                    _ => Poll::Pending,
                }
            });
            let Some((from, block)) = read.await else {
                return;
            };
            let encoder = match from {
                OutputStream::Stdout => &mut stdout.encoder,
                OutputStream::Stderr => &mut stderr.encoder,
            };
            self.write(encoder, &block);
            tokio::task::consume_budget().await;
        }
    }

    /// Writes a block of a stream; an empty block means end-of-file.
    fn write(&mut self, encoder: &mut RecordEncoder, block: &[u8]) {
        self.time = record::now(&self.time);
        let mut records = Vec::new();
        if block.is_empty() {
            encoder.finish(&self.time, &mut records);
            self.file.append(&records, &self.time);
        }
        let mut rest = block;
        while !rest.is_empty() {
            records.clear();
            let consumed = encoder.push(rest, &self.time, &mut records, LOG_WRITE_SIZE);
            rest = &rest[consumed..];
            self.file.append(&records, &self.time);
        }
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if self.is_used {
            self.file.finish(&self.time);
        } else {
            self.file.remove_if_empty();
        }
    }
}

/// One stream of a container.
struct OutputSource<R> {
    /// `None` after end-of-file.
    io: Option<R>,
    encoder: RecordEncoder,
    stream: OutputStream,
}

enum Polled {
    /// The block has data, or is empty at end-of-file.
    Read(OutputStream),
    Pending,
    /// End-of-file was read before.
    Ended,
}

impl<R: AsyncRead + Unpin> OutputSource<R> {
    fn new(io: Option<R>, stream: OutputStream) -> Self {
        Self {
            io,
            encoder: RecordEncoder::new(stream),
            stream,
        }
    }

    /// Reads into the empty block.
    fn poll(&mut self, context: &mut Context<'_>, block: &mut Vec<u8>) -> Polled {
        let Some(io) = &mut self.io else {
            return Polled::Ended;
        };
        let read = pin!(io.read_buf(block)).poll(context);
        match read {
            Poll::Pending => return Polled::Pending,
            Poll::Ready(Ok(read)) if read > 0 => {}
            Poll::Ready(end) => {
                // Reading a terminal ends with an error.
                if let Err(error) = end {
                    tracing::trace!(stream = ?self.stream, %error, "container output ended");
                }
                self.io = None;
            }
        }
        Polled::Read(self.stream)
    }
}

/// The current file of a log, and its rotation.
#[derive(Debug)]
pub(super) struct LogFile {
    files: LogFiles,
    limits: LogLimits,
    file: File,
    position: watch::Sender<WritePosition>,
    /// Output dropped since the last written record.
    lost: LostOutput,
    /// The last write error.
    write_error: String,
    /// Output dropped in total.
    total_lost: LostOutput,
    warn: Option<mpsc::UnboundedSender<String>>,
}

/// How much output was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LostOutput {
    lines: u64,
    bytes: u64,
}

impl LostOutput {
    fn add(&mut self, records: &[u8]) {
        self.lines += memchr::memchr_iter(b'\n', records).count() as u64;
        self.bytes += records.len() as u64;
    }

    fn message(self, reason: &str) -> String {
        let lines = if self.lines == 1 { "line" } else { "lines" };
        let Self { lines: n, bytes } = self;
        format!("{n} {lines} ({bytes} bytes) of this log were lost: {reason}")
    }
}

impl LogFile {
    pub(super) fn new(
        files: LogFiles,
        limits: LogLimits,
        file: File,
        position: watch::Sender<WritePosition>,
    ) -> Self {
        Self {
            files,
            limits,
            file,
            position,
            lost: LostOutput::default(),
            write_error: String::new(),
            total_lost: LostOutput::default(),
            warn: None,
        }
    }

    /// Adds the line feed that a killed writer may have left out.
    pub(super) fn terminate_last_record(&mut self) -> io::Result<()> {
        let length = self.position.borrow().length;
        let Some(last) = length.checked_sub(1) else {
            return Ok(());
        };
        let mut byte = [0];
        File::open(self.files.current())?.read_exact_at(&mut byte, last)?;
        if byte != *b"\n" {
            self.write(b"\n")?;
        }
        Ok(())
    }

    fn remove_if_empty(&self) {
        if self.position.borrow().length == 0 {
            let path = self.files.current();
            if let Err(error) = fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "cannot remove empty log");
            }
        }
    }

    /// Appends complete records, or drops and counts them.
    fn append(&mut self, records: &[u8], time: &str) {
        if records.is_empty() {
            return;
        }
        if let Err(error) = self.try_append(records, time) {
            self.write_error = error.to_string();
            if self.lost.lines == 0 {
                let path = self.files.current();
                tracing::warn!(path = %path.display(), %error, "dropping container output");
            }
            if self.total_lost.lines == 0 {
                self.warn(format!(
                    "cannot write the container's log, dropping its output: {error}"
                ));
            }
            self.lost.add(records);
            self.total_lost.add(records);
        }
    }

    fn try_append(&mut self, records: &[u8], time: &str) -> io::Result<()> {
        let length = self.position.borrow().length;
        if length > 0 && length + records.len() as u64 > self.limits.max_file_bytes {
            self.rotate()?;
        }
        self.note_lost_output(time)?;
        self.write(records)
    }

    /// Writes a note about dropped output.
    fn note_lost_output(&mut self, time: &str) -> io::Result<()> {
        if self.lost.lines > 0 {
            let text = self.lost.message(&self.write_error);
            self.write(&record::note(time, &text))?;
            self.lost = LostOutput::default();
        }
        Ok(())
    }

    /// Writes the final note about dropped output, and warns.
    fn finish(&mut self, time: &str) {
        if self.note_lost_output(time).is_err()
            && let Err(error) = self.replace_last_records(time)
        {
            let path = self.files.current();
            tracing::warn!(path = %path.display(), %error, "cannot note dropped output in the log");
        }
        if self.total_lost.lines > 0 {
            self.warn(self.total_lost.message(&self.write_error));
        }
    }

    /// Replaces the last records of the file by a note about dropped output: on a full disk only allocated blocks can be written.
    fn replace_last_records(&mut self, time: &str) -> io::Result<()> {
        let length = self.position.borrow().length;
        // `self.file` can only append.
        let path = self.files.current();
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let from = length.saturating_sub(SEARCH_SIZE);
        let mut end = vec![0; usize::try_from(length - from).unwrap_or_default()];
        file.read_exact_at(&mut end, from)?;
        let note = |lost: LostOutput| record::note(time, &lost.message(&self.write_error));
        // An upper bound of the note's length.
        let longest = note(LostOutput {
            lines: u64::MAX,
            bytes: u64::MAX,
        });
        let starts = memchr::memrchr_iter(b'\n', &end).map(|at| at + 1);
        let start = starts
            .chain((from == 0).then_some(0))
            .find(|start| end.len() - start >= longest.len())
            .ok_or_else(|| io::Error::other("the log is too short"))?;
        let (mut lost, mut total) = (self.lost, self.total_lost);
        lost.add(&end[start..]);
        total.add(&end[start..]);
        let note = note(lost);
        let at = from + start as u64;
        file.write_all_at(&note, at)?;
        file.set_len(at + note.len() as u64)?;
        self.position
            .send_modify(|position| position.length = at + note.len() as u64);
        (self.lost, self.total_lost) = (LostOutput::default(), total);
        Ok(())
    }

    fn warn(&self, message: String) {
        if let Some(warn) = &self.warn {
            // Fails after the container's exit, when the receiver is dropped.
            let _ = warn.send(message);
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = self.position.borrow().length;
        if let Err(error) = self.file.write_all(bytes) {
            // Remove a partially written record. If that fails too, readers skip it: they never read beyond `position`.
            let _ = self.file.set_len(length);
            return Err(error);
        }
        self.position
            .send_modify(|position| position.length += bytes.len() as u64);
        Ok(())
    }

    /// Starts a new file and removes the oldest if there are too many.
    fn rotate(&mut self) -> io::Result<()> {
        let segment = self.position.borrow().segment;
        if let Some(oldest) = (segment + 1).checked_sub(self.limits.max_files) {
            // First, because it frees disk space.
            ignore_missing(fs::remove_file(self.files.rotated(oldest)))?;
        }
        // Missing if an earlier rotation failed after this step.
        ignore_missing(fs::rename(
            self.files.current(),
            self.files.rotated(segment),
        ))?;
        self.file = self.files.append()?;
        self.position.send_replace(WritePosition {
            segment: segment + 1,
            length: 0,
        });
        Ok(())
    }
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_lost_on_full_disk_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let files = LogFiles::new(dir.path().to_owned(), 0);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let start = WritePosition {
            segment: 1,
            length: 0,
        };
        let (position, written) = watch::channel(start);
        let mut log = LogFile::new(files.clone(), LogLimits::default(), full, position);

        log.append(b"12345\n", "T");
        log.append(b"12345678\n", "T");
        assert_eq!((log.lost.lines, log.lost.bytes), (2, 15));
        assert_eq!(*written.borrow(), start);

        log.file = files.append().unwrap();
        log.append(b"T stdout F there\n", "T");
        assert_eq!(
            fs::read_to_string(files.current()).unwrap(),
            "T stderr F coracle: 2 lines (15 bytes) of this log were lost: No space left on device (os error 28)\n\
             T stdout F there\n"
        );
        assert_eq!(log.lost, LostOutput::default());
    }

    #[test]
    fn note_replaces_last_records_on_full_disk() {
        let dir = tempfile::tempdir().unwrap();
        let files = LogFiles::new(dir.path().to_owned(), 0);
        let start = WritePosition {
            segment: 1,
            length: 0,
        };
        let position = watch::Sender::new(start);
        let file = files.append().unwrap();
        let mut log = LogFile::new(files.clone(), LogLimits::default(), file, position);
        let (warn, mut warnings) = mpsc::unbounded_channel();
        log.warn = Some(warn);
        let long = "x".repeat(150);
        log.append(b"T stdout F first\n", "T");
        log.append(
            format!("T stdout F {long}\nT stdout F {long}\n").as_bytes(),
            "T",
        );
        // From now on appending fails, while overwriting still works.
        log.file = File::options().write(true).open("/dev/full").unwrap();
        log.append(b"T stdout F lost\n", "T");
        log.finish("T");
        let text = fs::read_to_string(files.current()).unwrap();
        assert_eq!(
            text,
            format!(
                "T stdout F first\nT stdout F {long}\n\
                 T stderr F coracle: 2 lines (178 bytes) of this log were lost: \
                 No space left on device (os error 28)\n"
            )
        );
        assert_eq!(log.position.borrow().length, text.len() as u64);
        let first = warnings.try_recv().unwrap();
        assert!(first.contains("No space left on device"), "{first}");
        let last = warnings.try_recv().unwrap();
        assert!(
            last.starts_with("2 lines (178 bytes) of this log"),
            "{last}"
        );
        assert!(warnings.try_recv().is_err(), "no other warnings");
    }

    #[test]
    fn short_log_on_full_disk_still_warns() {
        let dir = tempfile::tempdir().unwrap();
        let files = LogFiles::new(dir.path().to_owned(), 0);
        let start = WritePosition {
            segment: 1,
            length: 0,
        };
        files.append().unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let position = watch::Sender::new(start);
        let mut log = LogFile::new(files.clone(), LogLimits::default(), full, position);
        let (warn, mut warnings) = mpsc::unbounded_channel();
        log.warn = Some(warn);
        log.append(b"T stdout F lost\n", "T");
        log.finish("T");
        assert_eq!(fs::read(files.current()).unwrap(), b"");
        warnings.try_recv().unwrap();
        let last = warnings.try_recv().unwrap();
        assert!(last.starts_with("1 line (16 bytes) of this log"), "{last}");
    }

    #[test]
    fn interrupted_rotation_is_completed() {
        let dir = tempfile::tempdir().unwrap();
        let files = LogFiles::new(dir.path().to_owned(), 0);
        let start = WritePosition {
            segment: 1,
            length: 0,
        };
        let limits = LogLimits {
            max_file_bytes: 10,
            max_files: 2,
        };
        let file = files.append().unwrap();
        let mut log = LogFile::new(files.clone(), limits, file, watch::Sender::new(start));
        log.append(b"12345678\n", "T");
        fs::rename(files.current(), files.rotated(1)).unwrap();
        log.append(b"abcdefgh\n", "T");
        log.append(b"ABCDEFGH\n", "T");
        assert_eq!(fs::read(files.current()).unwrap(), b"ABCDEFGH\n");
        assert_eq!(fs::read(files.rotated(2)).unwrap(), b"abcdefgh\n");
        assert!(!files.rotated(1).exists());
    }

    #[test]
    fn truncated_record_is_terminated() {
        let dir = tempfile::tempdir().unwrap();
        let files = LogFiles::new(dir.path().to_owned(), 3);
        fs::write(files.current(), "T stdout F to").unwrap();
        let (_, position) = files.scan().unwrap();
        let position = watch::Sender::new(position);
        let file = files.append().unwrap();
        let mut log = LogFile::new(files.clone(), LogLimits::default(), file, position);
        log.terminate_last_record().unwrap();
        log.terminate_last_record().unwrap();
        log.append(b"T stdout F new\n", "T");
        assert_eq!(
            fs::read_to_string(files.current()).unwrap(),
            "T stdout F to\nT stdout F new\n"
        );
    }
}
