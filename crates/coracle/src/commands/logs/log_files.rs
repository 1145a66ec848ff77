//! Lists, prints and follows the components' log files.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use linux::file_id::FileId;

use crate::running_clusters::LocalCluster;

/// Polling interval: the files may be on a network file system, where inotify is not reliable.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Lists the components, with the sizes and paths of their logs.
pub fn list(cluster: &LocalCluster) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "cluster {}", cluster.name)?;
    let mut row =
        |name: &str, bytes: &str, file: &str| writeln!(out, "{name:<26}{bytes:>12}  {file}");
    row("COMPONENT", "BYTES", "FILE")?;
    for component in control_plane::ControlPlaneComponent::ALL {
        let [old, new] = files(&cluster.logs(), component.program());
        let size = |path: &Path| path.metadata().map_or(0, |meta| meta.len());
        let bytes = (size(&old) + size(&new)).to_string();
        row(component.program(), &bytes, &new.display().to_string())?;
    }
    row("kubelet/NODE", "", "in the memory of each node's agent")?;
    Ok(())
}

/// Prints a component's log, and follows it if `follow` is set.
pub async fn print_component(
    cluster: &LocalCluster,
    name: &str,
    tail: Option<usize>,
    follow: bool,
) -> anyhow::Result<()> {
    let [old, new] = files(&cluster.logs(), name);
    let mut out = io::stdout().lock();
    // Open it before reading the older file, because a rotation in between would rename it.
    let mut current = open(&new)?;
    let skip = match tail {
        Some(tail) => {
            let lines = count_lines(&old)? + current.as_mut().map_or(Ok(0), count_open_lines)?;
            lines.saturating_sub(tail)
        }
        None => 0,
    };
    let skip = match open(&old)? {
        Some(mut file) => copy_from_line(&mut file, skip, &mut out)?,
        None => skip,
    };
    if let Some(file) = &mut current {
        copy_from_line(file, skip, &mut out)?;
    }
    out.flush()?;
    if follow {
        FollowedLog {
            path: new,
            file: current,
        }
        .run(&mut out)
        .await
        .with_context(|| format!("cannot follow the log of {name}"))?;
    }
    Ok(())
}

/// The rotated file `NAME.log.1` and the current file `NAME.log`.
fn files(dir: &Path, name: &str) -> [PathBuf; 2] {
    ["log.1", "log"].map(|suffix| dir.join(format!("{name}.{suffix}")))
}

fn open(path: &Path) -> anyhow::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn count_lines(path: &Path) -> anyhow::Result<usize> {
    open(path)?.as_mut().map_or(Ok(0), count_open_lines)
}

/// Counts the lines of a file and rewinds it.
fn count_open_lines(file: &mut File) -> anyhow::Result<usize> {
    let mut lines = 0;
    let mut reader = BufReader::new(&*file);
    loop {
        let block = reader.fill_buf()?;
        if block.is_empty() {
            break;
        }
        lines += block.iter().filter(|byte| **byte == b'\n').count();
        let length = block.len();
        reader.consume(length);
    }
    file.seek(SeekFrom::Start(0))?;
    Ok(lines)
}

/// Copies a file except for its first `skip` lines. Returns how many lines are still to be skipped if the file has fewer.
fn copy_from_line(file: &mut File, mut skip: usize, out: &mut impl Write) -> io::Result<usize> {
    let mut reader = BufReader::new(&*file);
    while skip > 0 && reader.skip_until(b'\n')? > 0 {
        skip -= 1;
    }
    io::copy(&mut reader, out)?;
    // The copy included the buffer, so the file offset is right for the next read.
    Ok(skip)
}

/// A log file that grows and is rotated.
struct FollowedLog {
    path: PathBuf,
    file: Option<File>,
}

impl FollowedLog {
    /// Runs until the cluster ends, which removes the directory.
    async fn run(mut self, out: &mut impl Write) -> io::Result<()> {
        loop {
            if self.file.is_none() {
                self.file = match File::open(&self.path) {
                    Ok(file) => Some(file),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                    Err(error) => return Err(error),
                };
            }
            let is_rotated = self.is_rotated();
            if let Some(file) = &mut self.file {
                // Read after the check: a file that has been rotated gets no more lines, so this reads its end.
                io::copy(file, out)?;
                out.flush()?;
            }
            match is_rotated {
                Some(true) => self.file = None,
                Some(false) => tokio::time::sleep(POLL_INTERVAL).await,
                None => return Ok(()),
            }
        }
    }

    /// Whether the path is now another file; `None` if the directory is gone.
    fn is_rotated(&self) -> Option<bool> {
        let Some(file) = &self.file else {
            return self.path.parent()?.is_dir().then_some(false);
        };
        let opened = file.metadata().ok()?;
        match std::fs::metadata(&self.path) {
            Ok(found) => Some(FileId::from(&found) != FileId::from(&opened)),
            // In the middle of a rotation, or deleted.
            Err(_) => self.path.parent()?.is_dir().then_some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_may_begin_in_rotated_file() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = files(dir.path(), "etcd");
        std::fs::write(&old, "1\n2\n3\n").unwrap();
        std::fs::write(&new, "4\n5\n").unwrap();
        let printed = |tail: usize| {
            let mut out = Vec::new();
            let lines = count_lines(&old).unwrap() + count_lines(&new).unwrap();
            let skip = lines.saturating_sub(tail);
            let skip = copy_from_line(&mut File::open(&old).unwrap(), skip, &mut out).unwrap();
            copy_from_line(&mut File::open(&new).unwrap(), skip, &mut out).unwrap();
            String::from_utf8(out).unwrap().replace('\n', "")
        };
        assert_eq!(printed(100), "12345");
        assert_eq!(printed(3), "345");
        assert_eq!(printed(1), "5");
        assert_eq!(printed(0), "");
    }

    #[tokio::test]
    async fn log_is_followed_across_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("logs");
        std::fs::create_dir(&home).unwrap();
        let [old, new] = files(&home, "etcd");
        std::fs::write(&new, "1\n").unwrap();
        let followed = FollowedLog {
            path: new.clone(),
            file: Some(File::open(&new).unwrap()),
        };
        let mut out = Vec::new();
        let write = async {
            tokio::time::sleep(POLL_INTERVAL * 2).await;
            std::fs::rename(&new, &old).unwrap();
            std::fs::write(&new, "2\n").unwrap();
            tokio::time::sleep(POLL_INTERVAL * 3).await;
            std::fs::remove_dir_all(&home).unwrap();
        };
        let (result, ()) = tokio::join!(followed.run(&mut out), write);
        result.unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "1\n2\n");
    }
}
