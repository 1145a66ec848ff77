//! How the layers of an image become one file system, where the kernel does it and where it doesn't.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

/// Longer than any machine that is not broken takes.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// What its last words may be.
const MAX_WORDS: u64 = 4096;

/// How a node stacks layers. Found out once per node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stacking {
    /// By the kernel.
    #[default]
    Overlay,
    /// By this program, fuse-overlayfs, one process for each file system.
    Fuse(PathBuf),
    /// Not at all: all that they show is copied.
    Copy,
}

/// Layers that fuse-overlayfs shows at a place.
pub struct Mounted {
    place: PathBuf,
    process: Child,
}

/// Where changes to a stack go.
pub struct Changes<'a> {
    /// The changes.
    pub upper: &'a Path,
    /// An empty directory beside.
    pub work: &'a Path,
}

impl Mounted {
    /// Shows `layers`, the lowest first, at `place`, in the mount namespace of this process. The program ends with us.
    pub async fn new(
        program: &Path,
        layers: &[PathBuf],
        changes: Option<Changes<'_>>,
        place: &Path,
    ) -> io::Result<Self> {
        std::fs::create_dir_all(place)?;
        let words = File::create(words(place))?;
        let options = options(layers, changes.as_ref())?;
        let mut command = std::process::Command::new(program);
        command.arg("-f").arg("-o").arg(options).arg(place);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(words);
        linux::process::bind_to_us(&mut command, Signal::KILL);
        let process = Command::from(command).kill_on_drop(true).spawn();
        let process = process.map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", program.display()))
        })?;
        let mut mounted = Self {
            place: place.to_owned(),
            process,
        };
        match tokio::time::timeout(PATIENCE, mounted.appears()).await {
            Ok(Ok(())) => Ok(mounted),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                mounted.end().await;
                Err(io::Error::other("fuse-overlayfs did not mount the image"))
            }
        }
    }

    async fn appears(&mut self) -> io::Result<()> {
        while !linux::mounted::is_mounted(&self.place)? {
            if let Some(status) = self.process.try_wait()? {
                let mut text = Vec::new();
                File::open(words(&self.place))?
                    .take(MAX_WORDS)
                    .read_to_end(&mut text)?;
                let text = String::from_utf8_lossy(&text);
                let message = format!("fuse-overlayfs ended with {status}: {}", text.trim());
                return Err(io::Error::other(message));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Takes it away. The program ends by itself when nobody uses the mount any more, and is not waited for for ever.
    pub async fn end(mut self) {
        if let Err(error) = linux::mount::detach(&self.place) {
            tracing::debug!(place = %self.place.display(), %error, "not mounted");
        }
        let ended = tokio::time::timeout(Duration::from_secs(2), self.process.wait()).await;
        if ended.is_err() {
            let _ = self.process.kill().await;
        }
        let _ = std::fs::remove_dir(&self.place);
        let _ = std::fs::remove_file(words(&self.place));
    }
}

/// What the program complains of, in a file: it would not survive a pipe that nobody reads.
fn words(place: &Path) -> PathBuf {
    place.with_extension("words")
}

/// The options of fuse-overlayfs, in which some characters separate paths.
fn options(layers: &[PathBuf], changes: Option<&Changes<'_>>) -> io::Result<OsString> {
    let mut options = OsString::from("lowerdir=");
    for (at, layer) in layers.iter().rev().enumerate() {
        if at > 0 {
            options.push(":");
        }
        options.push(plain(layer)?);
    }
    if let Some(changes) = changes {
        for (name, path) in [("upperdir", changes.upper), ("workdir", changes.work)] {
            options.push(format!(",{name}="));
            options.push(plain(path)?);
        }
    }
    Ok(options)
}

fn plain(path: &Path) -> io::Result<&Path> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.iter().any(|byte| b":,\\".contains(byte)) {
        let message = format!(
            "{}: fuse-overlayfs takes no path with a colon, a comma or a backslash; point TMPDIR elsewhere",
            path.display()
        );
        return Err(io::Error::other(message));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uppermost_layer_comes_first() {
        let layers = ["/l/a", "/l/b"].map(PathBuf::from);
        let changes = Changes {
            upper: Path::new("/c/upper"),
            work: Path::new("/c/work"),
        };
        assert_eq!(
            options(&layers, Some(&changes)).unwrap(),
            "lowerdir=/l/b:/l/a,upperdir=/c/upper,workdir=/c/work"
        );
        assert_eq!(options(&layers[..1], None).unwrap(), "lowerdir=/l/a");
        assert!(options(&["/l/a:b".into()], None).is_err());
    }
}
