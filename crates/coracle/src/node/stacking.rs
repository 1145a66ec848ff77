//! How this node makes one file system of an image's layers: by the kernel's overlayfs, by fuse-overlayfs, or by a copy.

use std::path::{Path, PathBuf};

use anyhow::bail;
use sandbox::runtime::Snapshotter;

use crate::doctor::survey;

/// Lets a user choose, or a test.
pub const VARIABLE: &str = "CORACLE_ROOTFS";
/// The program, looked for on PATH.
const PROGRAM: &str = "fuse-overlayfs";

/// What the user has chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Best,
    Overlay,
    Fuse,
    Copy,
}

/// What the environment says.
pub fn choice() -> anyhow::Result<Choice> {
    match std::env::var(VARIABLE).unwrap_or_default().as_str() {
        "" => Ok(Choice::Best),
        "overlay" => Ok(Choice::Overlay),
        PROGRAM => Ok(Choice::Fuse),
        "copy" => Ok(Choice::Copy),
        other => bail!("{VARIABLE} is {other:?}; it may be overlay, {PROGRAM} or copy"),
    }
}

/// Finds out by trying in `dir`, on the file system that will hold containers' changes, unless the user has chosen.
pub async fn choose(dir: &Path) -> anyhow::Result<Snapshotter> {
    match choice()? {
        Choice::Best => {}
        Choice::Overlay => return Ok(Snapshotter::Overlay),
        Choice::Copy => return Ok(Snapshotter::Copy),
        Choice::Fuse => match program() {
            Some(program) => return Ok(Snapshotter::FuseOverlayfs(program)),
            None => bail!("{VARIABLE} asks for {PROGRAM}, which is not on this node's PATH"),
        },
    }
    let Err(why) = survey::overlay_in(dir).await else {
        return Ok(Snapshotter::Overlay);
    };
    let instead = match program() {
        Some(program) if survey::probe("fuse").await.is_ok() => Snapshotter::FuseOverlayfs(program),
        _ => Snapshotter::Copy,
    };
    tracing::info!(why, ?instead, "no overlayfs for root file systems");
    Ok(instead)
}

/// Where fuse-overlayfs is.
pub fn program() -> Option<PathBuf> {
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
