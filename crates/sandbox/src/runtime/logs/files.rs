//! The log files of one attempt of a container: `N.log`, and rotated before it `N.log.1`, `N.log.2`, …, the oldest first.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The log files of one attempt of a container.
#[derive(Clone, Debug)]
pub(super) struct LogFiles {
    dir: PathBuf,
    attempt: u32,
}

/// How far a log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WritePosition {
    /// Number of the current file, which becomes part of its name when it is rotated.
    pub segment: u64,
    /// Length of the current file, in complete records.
    pub length: u64,
}

impl LogFiles {
    pub(super) fn new(dir: PathBuf, attempt: u32) -> Self {
        Self { dir, attempt }
    }

    /// Path of the file that is written to.
    pub(super) fn current(&self) -> PathBuf {
        self.dir.join(format!("{}.log", self.attempt))
    }

    /// Path of a rotated file.
    pub(super) fn rotated(&self, segment: u64) -> PathBuf {
        self.dir.join(format!("{}.log.{segment}", self.attempt))
    }

    /// Opens a file for reading; `None` if it was removed. `written` determines which file is the current one.
    pub(super) fn open(&self, segment: u64, written: WritePosition) -> io::Result<Option<File>> {
        let path = if segment == written.segment {
            self.current()
        } else {
            self.rotated(segment)
        };
        match File::open(path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the current file for appending.
    pub(super) fn append(&self) -> io::Result<File> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.current())
    }

    /// Returns the number of the oldest file, and how far the log is written.
    pub(super) fn scan(&self) -> io::Result<(u64, WritePosition)> {
        let rotated: BTreeSet<u64> = names(&self.dir)?
            .filter(|(attempt, _)| *attempt == self.attempt)
            .filter_map(|(_, segment)| segment)
            .collect();
        let segment = rotated.last().map_or(1, |last| last + 1);
        let length = match fs::metadata(self.current()) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        let oldest = rotated.first().copied().unwrap_or(segment);
        Ok((oldest, WritePosition { segment, length }))
    }
}

/// The attempts of a container that have logs.
pub(super) fn attempts(dir: &Path) -> io::Result<BTreeSet<u32>> {
    match names(dir) {
        Ok(names) => Ok(names.map(|(attempt, _)| attempt).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

/// Removes the logs of all attempts before `attempt`. Errors are logged.
pub(super) fn remove_before(dir: &Path, attempt: u32) -> io::Result<()> {
    for (old, segment) in names(dir)?.filter(|(old, _)| *old < attempt) {
        let files = LogFiles::new(dir.to_owned(), old);
        let path = segment.map_or_else(|| files.current(), |segment| files.rotated(segment));
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove old log");
        }
    }
    Ok(())
}

/// The attempt of each log file, and its number if it is rotated.
fn names(dir: &Path) -> io::Result<impl Iterator<Item = (u32, Option<u64>)>> {
    Ok(fs::read_dir(dir)?.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        let (attempt, rest) = name.to_str()?.split_once(".log")?;
        let segment = match rest.strip_prefix('.') {
            None if rest.is_empty() => None,
            None => return None,
            Some(number) => Some(number.parse().ok()?),
        };
        Some((attempt.parse().ok()?, segment))
    }))
}
