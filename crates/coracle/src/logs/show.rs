//! Log files of components: listed, shown, followed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use linux::file_id::FileId;

use super::here::Found;

/// How soon more is shown. The files are in another mount namespace, or on a shared file system: nobody tells of changes.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Shows which logs there are.
pub fn list(cluster: &Found) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "cluster {}", cluster.name)?;
    let mut row =
        |name: &str, bytes: &str, place: &str| writeln!(out, "{name:<26}{bytes:>12}  {place}");
    row("COMPONENT", "BYTES", "FILE")?;
    for component in control_plane::Component::ALL {
        let [old, new] = files(&cluster.logs(), component.program());
        let size = |path: &Path| path.metadata().map_or(0, |meta| meta.len());
        let bytes = (size(&old) + size(&new)).to_string();
        row(component.program(), &bytes, &new.display().to_string())?;
    }
    row("kubelet/NODE", "", "in the memory of each node's agent")?;
    Ok(())
}

/// Shows a component's log.
pub async fn component(
    cluster: &Found,
    name: &str,
    tail: Option<usize>,
    follow: bool,
) -> anyhow::Result<()> {
    let [old, new] = files(&cluster.logs(), name);
    let mut out = io::stdout().lock();
    // Opened before anything is read: if it is moved away meanwhile, it is still the same file.
    let mut current = open(&new)?;
    let skip = match tail {
        Some(tail) => {
            let lines = count(&old)? + current.as_mut().map_or(Ok(0), count_open)?;
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
        Following {
            path: new,
            file: current,
        }
        .run(&mut out)
        .await
        .with_context(|| format!("cannot follow the log of {name}"))?;
    }
    Ok(())
}

/// `NAME.log.1`, which is full, and `NAME.log`.
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

fn count(path: &Path) -> anyhow::Result<usize> {
    open(path)?.as_mut().map_or(Ok(0), count_open)
}

/// Its lines; it is at its beginning again afterwards.
fn count_open(file: &mut File) -> anyhow::Result<usize> {
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

/// Writes what is in a file but for its first lines; how many of those are still to be left out when it has fewer.
fn copy_from_line(file: &mut File, mut skip: usize, out: &mut impl Write) -> io::Result<usize> {
    let mut reader = BufReader::new(&*file);
    while skip > 0 && reader.skip_until(b'\n')? > 0 {
        skip -= 1;
    }
    io::copy(&mut reader, out)?;
    // What the buffer had was written too: the next read goes on where the file is.
    Ok(skip)
}

/// A log that grows, and is moved away when it is full.
struct Following {
    path: PathBuf,
    file: Option<File>,
}

impl Following {
    /// Until the cluster's end: then its place in memory is gone.
    async fn run(mut self, out: &mut impl Write) -> io::Result<()> {
        loop {
            if self.file.is_none() {
                self.file = match File::open(&self.path) {
                    Ok(file) => Some(file),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                    Err(error) => return Err(error),
                };
            }
            let moved = self.has_moved();
            if let Some(file) = &mut self.file {
                // After the question whether it has moved: nothing is added to one that has.
                io::copy(file, out)?;
                out.flush()?;
            }
            match moved {
                Some(true) => self.file = None,
                Some(false) => tokio::time::sleep(LOOK_EVERY).await,
                None => return Ok(()),
            }
        }
    }

    /// Whether the file of that name is another one now; `None` if the directory is gone.
    fn has_moved(&self) -> Option<bool> {
        let Some(file) = &self.file else {
            return self.path.parent()?.is_dir().then_some(false);
        };
        let known = file.metadata().ok()?;
        match std::fs::metadata(&self.path) {
            Ok(found) => Some(FileId::from(&found) != FileId::from(&known)),
            // Between two names, or for ever.
            Err(_) => self.path.parent()?.is_dir().then_some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_may_begin_in_the_full_file() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = files(dir.path(), "etcd");
        std::fs::write(&old, "1\n2\n3\n").unwrap();
        std::fs::write(&new, "4\n5\n").unwrap();
        let shown = |tail: usize| {
            let mut out = Vec::new();
            let lines = count(&old).unwrap() + count(&new).unwrap();
            let skip = lines.saturating_sub(tail);
            let skip = copy_from_line(&mut File::open(&old).unwrap(), skip, &mut out).unwrap();
            copy_from_line(&mut File::open(&new).unwrap(), skip, &mut out).unwrap();
            String::from_utf8(out).unwrap().replace('\n', "")
        };
        assert_eq!(shown(100), "12345");
        assert_eq!(shown(3), "345");
        assert_eq!(shown(1), "5");
        assert_eq!(shown(0), "");
    }

    #[tokio::test]
    async fn a_log_is_followed_over_its_turn_and_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("logs");
        std::fs::create_dir(&home).unwrap();
        let [old, new] = files(&home, "etcd");
        std::fs::write(&new, "1\n").unwrap();
        let following = Following {
            path: new.clone(),
            file: Some(File::open(&new).unwrap()),
        };
        let mut out = Vec::new();
        let write = async {
            tokio::time::sleep(LOOK_EVERY * 2).await;
            std::fs::rename(&new, &old).unwrap();
            std::fs::write(&new, "2\n").unwrap();
            tokio::time::sleep(LOOK_EVERY * 3).await;
            std::fs::remove_dir_all(&home).unwrap();
        };
        let (followed, ()) = tokio::join!(following.run(&mut out), write);
        followed.unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "1\n2\n");
    }
}
