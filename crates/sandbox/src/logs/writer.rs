//! From a container's pipes into its log.
//!
//! A container never waits for its log: what can't be written, because the disk is full, is dropped and counted. The log
//! says so as soon as it can be written again, and at the latest when the container ends; there are warnings for the pod
//! when the first record is dropped, and at the end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{mpsc, watch};

use super::place::{Place, Progress};
use super::record::{self, Output, Splitter};
use super::{Limits, Live};

/// How much is read at once: as much as a pipe holds.
const BLOCK: usize = 64 * 1024;
/// How much is written at once, about.
const ENOUGH: usize = 128 * 1024;
/// How much of a log's end is looked at for records to put a note in place of: a few of the longest.
const END: u64 = 64 * 1024;

/// Writes the log of one run of a container. Dropped without being used, it leaves no log: a run that never began is
/// not the container's newest.
#[derive(Debug)]
pub struct LogWriter {
    file: LogFile,
    used: bool,
    /// The time of the last record.
    time: String,
    /// Tells readers that this is over when it goes.
    _live: Live,
}

impl LogWriter {
    pub(super) fn new(file: LogFile, live: Live) -> Self {
        Self {
            file,
            used: false,
            time: String::new(),
            _live: live,
        }
    }

    /// What goes wrong with this log, in words for the pod's user.
    pub fn warnings(&mut self) -> mpsc::UnboundedReceiver<String> {
        let (warn, warnings) = mpsc::unbounded_channel();
        self.file.warn = Some(warn);
        warnings
    }

    /// Copies a container's outputs into the log until both have ended. A container with a terminal has only one.
    pub async fn copy(
        mut self,
        stdout: impl AsyncRead + Unpin,
        stderr: Option<impl AsyncRead + Unpin>,
    ) {
        self.used = true;
        let mut stdout = Source::new(Some(stdout), Output::Stdout);
        let mut stderr = Source::new(stderr, Output::Stderr);
        let mut stderr_first = false;
        loop {
            stderr_first = !stderr_first;
            let read = std::future::poll_fn(|context| {
                // Not kept from one call to the next: a silent container needs no memory for what it does not say.
                let mut block = Vec::with_capacity(BLOCK);
                let first = if stderr_first {
                    stderr.poll(context, &mut block)
                } else {
                    stdout.poll(context, &mut block)
                };
                // One at a time, for there is one block: the other's turn is next.
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
            let splitter = match from {
                Output::Stdout => &mut stdout.splitter,
                Output::Stderr => &mut stderr.splitter,
            };
            self.write(splitter, &block);
            tokio::task::consume_budget().await;
        }
    }

    /// Writes what an output said; nothing means that it has ended.
    fn write(&mut self, splitter: &mut Splitter, block: &[u8]) {
        self.time = record::now(&self.time);
        let mut records = Vec::new();
        if block.is_empty() {
            splitter.finish(&self.time, &mut records);
            self.file.append(&records, &self.time);
        }
        let mut rest = block;
        while !rest.is_empty() {
            records.clear();
            let taken = splitter.push(rest, &self.time, &mut records, ENOUGH);
            rest = &rest[taken..];
            self.file.append(&records, &self.time);
        }
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if self.used {
            self.file.finish(&self.time);
        } else {
            self.file.remove_if_empty();
        }
    }
}

/// One output of a container.
struct Source<R> {
    /// None once it has ended.
    io: Option<R>,
    splitter: Splitter,
    output: Output,
}

/// What became of an attempt to read.
enum Polled {
    /// There is something in the block, or nothing because this output has just ended.
    Read(Output),
    /// Nothing now.
    Waiting,
    /// Nothing ever again.
    Ended,
}

impl<R: AsyncRead + Unpin> Source<R> {
    fn new(io: Option<R>, output: Output) -> Self {
        Self {
            io,
            splitter: Splitter::new(output),
            output,
        }
    }

    /// Reads into the block, which is empty.
    fn poll(&mut self, context: &mut Context<'_>, block: &mut Vec<u8>) -> Polled {
        let Some(io) = &mut self.io else {
            return Polled::Ended;
        };
        let read = pin!(io.read_buf(block)).poll(context);
        match read {
            Poll::Pending => return Polled::Waiting,
            Poll::Ready(Ok(read)) if read > 0 => {}
            Poll::Ready(ended) => {
                // The last word of a terminal is an error.
                if let Err(error) = ended {
                    tracing::trace!(output = ?self.output, %error, "a container's output ended");
                }
                self.io = None;
            }
        }
        Polled::Read(self.output)
    }
}

/// The file of a log, and those before it.
#[derive(Debug)]
pub(super) struct LogFile {
    place: Place,
    limits: Limits,
    file: File,
    progress: watch::Sender<Progress>,
    /// What was dropped since the last record that was written, and why.
    lost: Lost,
    why: String,
    /// What was dropped of the whole run.
    lost_in_all: Lost,
    warn: Option<mpsc::UnboundedSender<String>>,
}

/// How much of a log was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lost {
    lines: u64,
    bytes: u64,
}

impl Lost {
    fn add(&mut self, records: &[u8]) {
        self.lines += memchr::memchr_iter(b'\n', records).count() as u64;
        self.bytes += records.len() as u64;
    }

    fn words(self, why: &str) -> String {
        let lines = if self.lines == 1 { "line" } else { "lines" };
        let Self { lines: n, bytes } = self;
        format!("{n} {lines} ({bytes} bytes) of this log were lost: {why}")
    }
}

impl LogFile {
    pub(super) fn new(
        place: Place,
        limits: Limits,
        file: File,
        progress: watch::Sender<Progress>,
    ) -> Self {
        Self {
            place,
            limits,
            file,
            progress,
            lost: Lost::default(),
            why: String::new(),
            lost_in_all: Lost::default(),
            warn: None,
        }
    }

    /// Goes on where another writer may have been torn away in the middle of a record.
    pub(super) fn mend(&mut self) -> io::Result<()> {
        let length = self.progress.borrow().length;
        let Some(last) = length.checked_sub(1) else {
            return Ok(());
        };
        let mut byte = [0];
        File::open(self.place.current())?.read_exact_at(&mut byte, last)?;
        if byte != *b"\n" {
            self.write(b"\n")?;
        }
        Ok(())
    }

    fn remove_if_empty(&self) {
        if self.progress.borrow().length == 0 {
            let path = self.place.current();
            if let Err(error) = fs::remove_file(&path) {
                tracing::debug!(path = %path.display(), %error, "an empty log can't be removed");
            }
        }
    }

    /// Adds whole records, or drops them and remembers that.
    fn append(&mut self, records: &[u8], time: &str) {
        if records.is_empty() {
            return;
        }
        if let Err(error) = self.try_append(records, time) {
            self.why = error.to_string();
            if self.lost.lines == 0 {
                let path = self.place.current();
                tracing::warn!(path = %path.display(), %error, "dropping container output");
            }
            if self.lost_in_all.lines == 0 {
                self.warn(format!(
                    "cannot write the container's log, so its output is dropped: {error}"
                ));
            }
            self.lost.add(records);
            self.lost_in_all.add(records);
        }
    }

    fn try_append(&mut self, records: &[u8], time: &str) -> io::Result<()> {
        let length = self.progress.borrow().length;
        if length > 0 && length + records.len() as u64 > self.limits.segment_bytes {
            self.rotate()?;
        }
        self.note_losses(time)?;
        self.write(records)
    }

    /// Says in the log what was lost before this.
    fn note_losses(&mut self, time: &str) -> io::Result<()> {
        if self.lost.lines > 0 {
            let text = self.lost.words(&self.why);
            self.write(&record::note(time, &text))?;
            self.lost = Lost::default();
        }
        Ok(())
    }

    /// The run is over: whoever reads its log must not take it for complete.
    fn finish(&mut self, time: &str) {
        if self.note_losses(time).is_err()
            && let Err(error) = self.replace_end(time)
        {
            let path = self.place.current();
            tracing::warn!(path = %path.display(), %error, "cannot note lost output in the log");
        }
        if self.lost_in_all.lines > 0 {
            self.warn(self.lost_in_all.words(&self.why));
        }
    }

    /// Puts the note about lost records in place of the newest ones that were written: on a full disk a file can be
    /// written only where it has blocks already.
    fn replace_end(&mut self, time: &str) -> io::Result<()> {
        let length = self.progress.borrow().length;
        // Not the one that only appends.
        let path = self.place.current();
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let from = length.saturating_sub(END);
        let mut end = vec![0; usize::try_from(length - from).unwrap_or_default()];
        file.read_exact_at(&mut end, from)?;
        let note = |lost: Lost| record::note(time, &lost.words(&self.why));
        // Longer than the note with any numbers.
        let longest = note(Lost {
            lines: u64::MAX,
            bytes: u64::MAX,
        });
        let starts = memchr::memrchr_iter(b'\n', &end).map(|at| at + 1);
        let start = starts
            .chain((from == 0).then_some(0))
            .find(|start| end.len() - start >= longest.len())
            .ok_or_else(|| io::Error::other("the log is too short for a note"))?;
        let (mut lost, mut in_all) = (self.lost, self.lost_in_all);
        lost.add(&end[start..]);
        in_all.add(&end[start..]);
        let note = note(lost);
        let at = from + start as u64;
        file.write_all_at(&note, at)?;
        file.set_len(at + note.len() as u64)?;
        self.progress
            .send_modify(|progress| progress.length = at + note.len() as u64);
        (self.lost, self.lost_in_all) = (Lost::default(), in_all);
        Ok(())
    }

    fn warn(&self, words: String) {
        if let Some(warn) = &self.warn {
            // After the container's end nobody may listen.
            let _ = warn.send(words);
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = self.progress.borrow().length;
        if let Err(error) = self.file.write_all(bytes) {
            // A part may have been written, and half a record is worse than none. If this fails too, a reader passes
            // over what is left, as readers never look beyond whole records.
            let _ = self.file.set_len(length);
            return Err(error);
        }
        self.progress
            .send_modify(|progress| progress.length += bytes.len() as u64);
        Ok(())
    }

    /// Begins a new file; the oldest goes if there are too many.
    fn rotate(&mut self) -> io::Result<()> {
        let segment = self.progress.borrow().segment;
        if let Some(oldest) = (segment + 1).checked_sub(self.limits.segments) {
            // First of all, for its room may be what is missing.
            if_there(fs::remove_file(self.place.full(oldest)))?;
        }
        // It is not there if an earlier attempt got just as far as here.
        if_there(fs::rename(self.place.current(), self.place.full(segment)))?;
        self.file = self.place.write()?;
        self.progress.send_replace(Progress {
            segment: segment + 1,
            length: 0,
        });
        Ok(())
    }
}

fn if_there(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_full_disk_swallows_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path().to_owned(), 0);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let start = Progress {
            segment: 1,
            length: 0,
        };
        let (progress, written) = watch::channel(start);
        let mut log = LogFile::new(place.clone(), Limits::default(), full, progress);

        log.append(b"12345\n", "T");
        log.append(b"12345678\n", "T");
        assert_eq!((log.lost.lines, log.lost.bytes), (2, 15));
        assert_eq!(*written.borrow(), start);

        log.file = place.write().unwrap();
        log.append(b"T stdout F there\n", "T");
        assert_eq!(
            fs::read_to_string(place.current()).unwrap(),
            "T stderr F coracle: 2 lines (15 bytes) of this log were lost: No space left on device (os error 28)\n\
             T stdout F there\n"
        );
        assert_eq!(log.lost, Lost::default());
    }

    #[test]
    fn a_log_that_ends_on_a_full_disk_tells_its_losses() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path().to_owned(), 0);
        let start = Progress {
            segment: 1,
            length: 0,
        };
        let progress = watch::Sender::new(start);
        let file = place.write().unwrap();
        let mut log = LogFile::new(place.clone(), Limits::default(), file, progress);
        let (warn, mut warnings) = mpsc::unbounded_channel();
        log.warn = Some(warn);
        let long = "x".repeat(150);
        log.append(b"T stdout F first\n", "T");
        log.append(
            format!("T stdout F {long}\nT stdout F {long}\n").as_bytes(),
            "T",
        );
        // Nothing can be appended from now on; what is there can still be overwritten.
        log.file = File::options().write(true).open("/dev/full").unwrap();
        log.append(b"T stdout F lost\n", "T");
        log.finish("T");
        let text = fs::read_to_string(place.current()).unwrap();
        assert_eq!(
            text,
            format!(
                "T stdout F first\nT stdout F {long}\n\
                 T stderr F coracle: 2 lines (178 bytes) of this log were lost: \
                 No space left on device (os error 28)\n"
            )
        );
        assert_eq!(log.progress.borrow().length, text.len() as u64);
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
    fn a_short_log_on_a_full_disk_still_warns() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path().to_owned(), 0);
        let start = Progress {
            segment: 1,
            length: 0,
        };
        place.write().unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let progress = watch::Sender::new(start);
        let mut log = LogFile::new(place.clone(), Limits::default(), full, progress);
        let (warn, mut warnings) = mpsc::unbounded_channel();
        log.warn = Some(warn);
        log.append(b"T stdout F lost\n", "T");
        log.finish("T");
        assert_eq!(fs::read(place.current()).unwrap(), b"");
        warnings.try_recv().unwrap();
        let last = warnings.try_recv().unwrap();
        assert!(last.starts_with("1 line (16 bytes) of this log"), "{last}");
    }

    #[test]
    fn a_rotation_that_failed_half_way_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path().to_owned(), 0);
        let start = Progress {
            segment: 1,
            length: 0,
        };
        let limits = Limits {
            segment_bytes: 10,
            segments: 2,
        };
        let file = place.write().unwrap();
        let mut log = LogFile::new(place.clone(), limits, file, watch::Sender::new(start));
        log.append(b"12345678\n", "T");
        fs::rename(place.current(), place.full(1)).unwrap();
        log.append(b"abcdefgh\n", "T");
        log.append(b"ABCDEFGH\n", "T");
        assert_eq!(fs::read(place.current()).unwrap(), b"ABCDEFGH\n");
        assert_eq!(fs::read(place.full(2)).unwrap(), b"abcdefgh\n");
        assert!(!place.full(1).exists());
    }

    #[test]
    fn a_torn_record_gets_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path().to_owned(), 3);
        fs::write(place.current(), "T stdout F to").unwrap();
        let (_, progress) = place.survey().unwrap();
        let progress = watch::Sender::new(progress);
        let file = place.write().unwrap();
        let mut log = LogFile::new(place.clone(), Limits::default(), file, progress);
        log.mend().unwrap();
        log.mend().unwrap();
        log.append(b"T stdout F new\n", "T");
        assert_eq!(
            fs::read_to_string(place.current()).unwrap(),
            "T stdout F to\nT stdout F new\n"
        );
    }
}
