//! Selects how this node assembles root file systems from an image's layers: overlayfs, fuse-overlayfs, or a copy.

use std::path::{Path, PathBuf};

use anyhow::bail;
use sandbox::runtime::Snapshotter;

use crate::probe;

/// The variable that overrides the automatic choice.
pub const VARIABLE: &str = "CORACLE_ROOTFS";
/// The program that is looked up on PATH.
const PROGRAM: &str = "fuse-overlayfs";

/// The value of [`VARIABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Best,
    Overlay,
    Fuse,
    Copy,
}

/// Reads [`VARIABLE`].
pub fn choice() -> anyhow::Result<Choice> {
    match std::env::var(VARIABLE).unwrap_or_default().as_str() {
        "" => Ok(Choice::Best),
        "overlay" => Ok(Choice::Overlay),
        PROGRAM => Ok(Choice::Fuse),
        "copy" => Ok(Choice::Copy),
        other => bail!("{VARIABLE} is {other:?}; it may be overlay, {PROGRAM} or copy"),
    }
}

/// Returns the user's choice, or the best method that works in `dir`, on the file system for containers' writable layers.
pub async fn choose(dir: &Path) -> anyhow::Result<Snapshotter> {
    match choice()? {
        Choice::Best => {}
        Choice::Overlay => return Ok(Snapshotter::Overlay),
        Choice::Copy => return Ok(Snapshotter::Copy),
        Choice::Fuse => match fuse_overlayfs() {
            Some(program) => return Ok(Snapshotter::FuseOverlayfs(program)),
            None => bail!("{VARIABLE} asks for {PROGRAM}, which is not on this node's PATH"),
        },
    }
    let Err(why) = probe::overlay_in(dir).await else {
        return Ok(Snapshotter::Overlay);
    };
    let instead = match fuse_overlayfs() {
        Some(program) if probe::run("fuse").await.is_ok() => Snapshotter::FuseOverlayfs(program),
        _ => Snapshotter::Copy,
    };
    tracing::info!(
        why,
        ?instead,
        "overlayfs is not available for root file systems"
    );
    Ok(instead)
}

/// Finds fuse-overlayfs on PATH.
pub fn fuse_overlayfs() -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(PROGRAM))
        .find(|file| {
            std::fs::metadata(file)
                .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        })
}
