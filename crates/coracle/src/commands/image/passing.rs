//! A progress bar for archives that are read or written.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use console::{DownloadProgress, FileProgress};

/// Interval between updates of the bar.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A reader or writer that shows the number of bytes passed through.
#[derive(Debug)]
pub struct Passing<T> {
    inner: T,
    at: u64,
    told: Instant,
    progress: FileProgress,
}

impl<T> Passing<T> {
    /// `name` is shown to the user; `total` is the size, if known.
    pub fn new(inner: T, name: &str, total: Option<u64>) -> Self {
        let mut progress = DownloadProgress::new().file(name);
        progress.begin_quietly(total);
        Self {
            inner,
            at: 0,
            told: Instant::now(),
            progress,
        }
    }

    fn passed(&mut self, n: usize) {
        self.at += n as u64;
        if self.told.elapsed() > TELL_EVERY {
            self.told = Instant::now();
            self.progress.advance(self.at);
        }
    }
}

impl<T: Read> Read for Passing<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.passed(n);
        Ok(n)
    }
}

impl<T: Write> Write for Passing<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.passed(n);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T> Drop for Passing<T> {
    fn drop(&mut self) {
        self.progress.clear();
    }
}
