//! Selects the snapshotter of this node, which makes root file systems from an image's layers: overlayfs, fuse-overlayfs, or a copy.

use std::path::{Path, PathBuf};

use anyhow::bail;
use sandbox::runtime::Snapshotter;

use crate::roles::probe;

/// The variable that overrides the automatic choice.
pub const VARIABLE: &str = "CORACLE_ROOTFS";
/// The file name of fuse-overlayfs, which is searched for on PATH.
const FUSE_OVERLAYFS: &str = "fuse-overlayfs";

/// The value of [`VARIABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotterChoice {
    Auto,
    Overlay,
    Fuse,
    Copy,
}

/// Reads [`VARIABLE`].
pub fn from_environment() -> anyhow::Result<SnapshotterChoice> {
    match std::env::var(VARIABLE).unwrap_or_default().as_str() {
        "" => Ok(SnapshotterChoice::Auto),
        "overlay" => Ok(SnapshotterChoice::Overlay),
        FUSE_OVERLAYFS => Ok(SnapshotterChoice::Fuse),
        "copy" => Ok(SnapshotterChoice::Copy),
        other => bail!("{VARIABLE} is {other:?}; it may be overlay, {FUSE_OVERLAYFS} or copy"),
    }
}

/// Returns the user's choice, or the best snapshotter that works in `dir`, on the file system for containers' writable layers.
pub async fn select(dir: &Path) -> anyhow::Result<Snapshotter> {
    match from_environment()? {
        SnapshotterChoice::Auto => {}
        SnapshotterChoice::Overlay => return Ok(Snapshotter::Overlay),
        SnapshotterChoice::Copy => return Ok(Snapshotter::Copy),
        SnapshotterChoice::Fuse => match fuse_overlayfs() {
            Some(program) => return Ok(Snapshotter::FuseOverlayfs(program)),
            None => bail!("{VARIABLE} asks for {FUSE_OVERLAYFS}, which is not on this node's PATH"),
        },
    }
    let Err(reason) = probe::overlayfs_in(dir).await else {
        return Ok(Snapshotter::Overlay);
    };
    let fallback = match fuse_overlayfs() {
        Some(program) if probe::run_process("fuse").await.is_ok() => {
            Snapshotter::FuseOverlayfs(program)
        }
        _ => Snapshotter::Copy,
    };
    tracing::info!(
        reason,
        ?fallback,
        "overlayfs is not available for root file systems"
    );
    Ok(fallback)
}

/// Finds fuse-overlayfs on PATH.
pub fn fuse_overlayfs() -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(FUSE_OVERLAYFS))
        .find(|file| {
            std::fs::metadata(file).is_ok_and(|metadata| {
                metadata.is_file() && metadata.permissions().mode() & 0o111 != 0
            })
        })
}
