//! A log file of bounded size, with its last lines in memory.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The number of lines kept for error messages.
const TAIL_LINES: usize = 20;
/// Longer lines are truncated in messages, but not in the file.
const TAIL_WIDTH: usize = 400;

/// `NAME.log`, renamed to `NAME.log.1` when it is full: at most two files of `limit` bytes.
#[derive(Debug)]
pub struct RotatingLog {
    path: PathBuf,
    file: File,
    written: u64,
    limit: u64,
    tail: VecDeque<String>,
    write_failed: bool,
}

impl RotatingLog {
    /// Opens `dir/name.log` for appending.
    pub fn open(dir: &Path, name: &str, limit: u64) -> io::Result<Self> {
        let path = dir.join(format!("{name}.log"));
        let file = append_to(&path)?;
        let written = file.metadata()?.len();
        Ok(Self {
            path,
            file,
            written,
            limit,
            tail: VecDeque::with_capacity(TAIL_LINES),
            write_failed: false,
        })
    }

    /// Writes one line. On a full disk the line is lost, but the component keeps running. Only the first failure is
    /// returned.
    pub fn write_line(&mut self, line: &[u8]) -> io::Result<()> {
        match self.append(line) {
            Err(error) if !self.write_failed => {
                self.write_failed = true;
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        let text = String::from_utf8_lossy(line);
        self.tail.push_back(text.chars().take(TAIL_WIDTH).collect());
        if self.written + line.len() as u64 >= self.limit {
            self.rotate()?;
        }
        self.file.write_all(line)?;
        self.file.write_all(b"\n")?;
        self.written += line.len() as u64 + 1;
        Ok(())
    }

    /// The last lines.
    pub fn tail(&self) -> Vec<String> {
        self.tail.iter().cloned().collect()
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        std::fs::rename(&self.path, old)?;
        self.file = append_to(&self.path)?;
        self.written = 0;
        Ok(())
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_size_is_bounded_and_tail_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = RotatingLog::open(dir.path(), "etcd", 100).unwrap();
        for i in 0..50 {
            log.write_line(format!("line number {i}").as_bytes())
                .unwrap();
        }
        let sizes: Vec<u64> = ["etcd.log", "etcd.log.1"]
            .map(|f| std::fs::metadata(dir.path().join(f)).unwrap().len())
            .to_vec();
        assert!(sizes.iter().all(|s| *s <= 100), "{sizes:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(log.tail().len(), TAIL_LINES);
        assert_eq!(log.tail().last().unwrap(), "line number 49");
    }

    #[test]
    fn write_failure_is_reported_once() {
        let full = File::options().append(true).open("/dev/full").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut log = RotatingLog::open(dir.path(), "x", 1000).unwrap();
        log.file = full;
        assert!(log.write_line(b"one").is_err());
        assert!(log.write_line(b"two").is_ok());
        assert_eq!(log.tail(), ["one", "two"]);
    }

    #[test]
    fn invalid_utf8_is_written_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = RotatingLog::open(dir.path(), "x", 1000).unwrap();
        log.write_line(b"\xff\xfe").unwrap();
        assert_eq!(
            std::fs::read(dir.path().join("x.log")).unwrap(),
            b"\xff\xfe\n"
        );
    }
}
