//! A progress bar for archives that are read or written.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use console::{DownloadProgress, FileProgress};

/// Interval between updates of the bar.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// A reader or writer that shows the number of bytes passed through.
#[derive(Debug)]
pub struct ProgressStream<T> {
    inner: T,
    position: u64,
    updated: Instant,
    progress: FileProgress,
}

impl<T> ProgressStream<T> {
    /// Wraps `inner`. `name` is shown to the user; `total` is the size, if it is known.
    pub fn new(inner: T, name: &str, total: Option<u64>) -> Self {
        let mut progress = DownloadProgress::on_stderr().file(name);
        progress.begin_quietly(total);
        Self {
            inner,
            position: 0,
            updated: Instant::now(),
            progress,
        }
    }

    fn count(&mut self, n: usize) {
        self.position += n as u64;
        if self.updated.elapsed() > UPDATE_INTERVAL {
            self.updated = Instant::now();
            self.progress.advance(self.position);
        }
    }
}

impl<T: Read> Read for ProgressStream<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.count(n);
        Ok(n)
    }
}

impl<T: Write> Write for ProgressStream<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.count(n);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T> Drop for ProgressStream<T> {
    fn drop(&mut self) {
        self.progress.clear();
    }
}
