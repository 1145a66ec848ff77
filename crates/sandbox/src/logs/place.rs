//! Where the log of one run of a container lies: `N.log`, and before it `N.log.1`, `N.log.2`, …, the oldest first.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The files of one run of one container.
#[derive(Clone, Debug)]
pub(super) struct Place {
    dir: PathBuf,
    attempt: u32,
}

/// How far a log has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// The number of the file that is written to; it gets a name with that number when it is full.
    pub segment: u64,
    /// How long that file is, in whole records.
    pub length: u64,
}

impl Place {
    pub(super) fn new(dir: PathBuf, attempt: u32) -> Self {
        Self { dir, attempt }
    }

    /// The file that is written to.
    pub(super) fn current(&self) -> PathBuf {
        self.dir.join(format!("{}.log", self.attempt))
    }

    /// A file that is full.
    pub(super) fn full(&self, segment: u64) -> PathBuf {
        self.dir.join(format!("{}.log.{segment}", self.attempt))
    }

    /// Opens a file to read; `None` if it is not there any more.
    pub(super) fn open(&self, segment: u64, progress: Progress) -> io::Result<Option<File>> {
        let path = if segment == progress.segment {
            self.current()
        } else {
            self.full(segment)
        };
        match File::open(path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the current file to write.
    pub(super) fn write(&self) -> io::Result<File> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.current())
    }

    /// The oldest file that there is, and how far the log has been written.
    pub(super) fn survey(&self) -> io::Result<(u64, Progress)> {
        let full: BTreeSet<u64> = names(&self.dir)?
            .filter(|(attempt, _)| *attempt == self.attempt)
            .filter_map(|(_, segment)| segment)
            .collect();
        let segment = full.last().map_or(1, |last| last + 1);
        let length = match fs::metadata(self.current()) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        let oldest = full.first().copied().unwrap_or(segment);
        Ok((oldest, Progress { segment, length }))
    }
}

/// The runs of a container that have logs.
pub(super) fn attempts(dir: &Path) -> io::Result<BTreeSet<u32>> {
    match names(dir) {
        Ok(names) => Ok(names.map(|(attempt, _)| attempt).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

/// Removes the logs of all runs before `attempt`, as far as that works.
pub(super) fn remove_before(dir: &Path, attempt: u32) -> io::Result<()> {
    for (old, segment) in names(dir)?.filter(|(old, _)| *old < attempt) {
        let place = Place::new(dir.to_owned(), old);
        let path = segment.map_or_else(|| place.current(), |segment| place.full(segment));
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "an old log can't be removed");
        }
    }
    Ok(())
}

/// Each log file's run, and its number if it is full.
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
