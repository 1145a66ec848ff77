//! How the layers of an image are merged into one file system, with and without the kernel's overlayfs.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

const MOUNT_TIMEOUT: Duration = Duration::from_secs(20);
const MOUNT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How long fuse-overlayfs may take to exit after its mount is detached.
const FUSE_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How much of its standard error goes into an error message.
const MAX_FUSE_STDERR: u64 = 4096;

/// How a node merges layers. Detected once per node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snapshotter {
    /// The kernel's overlayfs.
    #[default]
    Overlay,
    /// fuse-overlayfs at this path, one process per mount.
    FuseOverlayfs(PathBuf),
    /// Layers are copied.
    Copy,
}

impl std::fmt::Display for Snapshotter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Overlay => "overlay",
            Self::FuseOverlayfs(_) => "fuse-overlayfs",
            Self::Copy => "copy",
        })
    }
}

/// A mount of fuse-overlayfs.
pub struct FuseMount {
    mount_point: PathBuf,
    process: Child,
}

/// The writable directories of an overlay mount.
pub struct UpperDir<'a> {
    /// `upperdir`
    pub upper: &'a Path,
    /// `workdir`, on the same file system.
    pub work: &'a Path,
}

impl FuseMount {
    /// Mounts `layers`, the lowest first, in the mount namespace of this process. The program dies with this process.
    pub async fn new(
        program: &Path,
        layers: &[PathBuf],
        upper: Option<UpperDir<'_>>,
        mount_point: &Path,
    ) -> io::Result<Self> {
        std::fs::create_dir_all(mount_point)?;
        let stderr = File::create(stderr_path(mount_point))?;
        let options = options(layers, upper.as_ref())?;
        let mut command = std::process::Command::new(program);
        command.arg("-f").arg("-o").arg(options).arg(mount_point);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        linux::process::set_death_signal_in_new_group(&mut command, Signal::KILL);
        let process = Command::from(command).kill_on_drop(true).spawn();
        let process = process.map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", program.display()))
        })?;
        let mut mount = Self {
            mount_point: mount_point.to_owned(),
            process,
        };
        match tokio::time::timeout(MOUNT_TIMEOUT, mount.wait_mounted()).await {
            Ok(Ok(())) => Ok(mount),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                mount.unmount().await;
                Err(io::Error::other("fuse-overlayfs timed out"))
            }
        }
    }

    async fn wait_mounted(&mut self) -> io::Result<()> {
        while !linux::mountinfo::is_mounted(&self.mount_point)? {
            if let Some(status) = self.process.try_wait()? {
                let mut text = Vec::new();
                File::open(stderr_path(&self.mount_point))?
                    .take(MAX_FUSE_STDERR)
                    .read_to_end(&mut text)?;
                let text = String::from_utf8_lossy(&text);
                let message = format!("fuse-overlayfs exited with {status}: {}", text.trim());
                return Err(io::Error::other(message));
            }
            tokio::time::sleep(MOUNT_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Unmounts. The program exits by itself when the mount is no longer in use; the wait for that is bounded.
    pub async fn unmount(mut self) {
        if let Err(error) = linux::mount::detach(&self.mount_point) {
            tracing::debug!(mount_point = %self.mount_point.display(), %error, "cannot unmount fuse-overlayfs");
        }
        let exited = tokio::time::timeout(FUSE_EXIT_TIMEOUT, self.process.wait()).await;
        if exited.is_err() {
            let _ = self.process.kill().await;
        }
        let _ = std::fs::remove_dir(&self.mount_point);
        let _ = std::fs::remove_file(stderr_path(&self.mount_point));
    }
}

/// The program's standard error goes to a file: without a reader, writing to a pipe would kill it.
fn stderr_path(mount_point: &Path) -> PathBuf {
    mount_point.with_extension("stderr")
}

fn options(layers: &[PathBuf], upper: Option<&UpperDir<'_>>) -> io::Result<OsString> {
    let mut options = OsString::from("lowerdir=");
    for (at, layer) in layers.iter().rev().enumerate() {
        if at > 0 {
            options.push(":");
        }
        options.push(checked(layer)?);
    }
    if let Some(dirs) = upper {
        for (name, path) in [("upperdir", dirs.upper), ("workdir", dirs.work)] {
            options.push(format!(",{name}="));
            options.push(checked(path)?);
        }
    }
    Ok(options)
}

/// Rejects a path with characters that are separators in mount options.
fn checked(path: &Path) -> io::Result<&Path> {
    let bytes = path.as_os_str().as_encoded_bytes();
    if bytes.iter().any(|byte| b":,\\".contains(byte)) {
        let message = format!(
            "fuse-overlayfs does not accept a colon, comma or backslash in {} (hint: set TMPDIR to another directory)",
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
    fn topmost_layer_is_first_in_lowerdir() {
        let layers = ["/l/a", "/l/b"].map(PathBuf::from);
        let upper = UpperDir {
            upper: Path::new("/c/upper"),
            work: Path::new("/c/work"),
        };
        assert_eq!(
            options(&layers, Some(&upper)).unwrap(),
            "lowerdir=/l/b:/l/a,upperdir=/c/upper,workdir=/c/work"
        );
        assert_eq!(options(&layers[..1], None).unwrap(), "lowerdir=/l/a");
        assert!(options(&["/l/a:b".into()], None).is_err());
    }
}
