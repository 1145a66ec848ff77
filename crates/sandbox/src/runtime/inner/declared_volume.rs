//! Volumes that an image declares (VOLUME): directories of the container, writable even if its root is read-only.

use std::path::Path;

use linux::mount_tree::MountTree;

use super::container;
use super::error::{InnerError, cannot};
use super::message::DeclaredVolume;

/// A detached mount of a volume.
pub struct OpenVolume<'a> {
    tree: MountTree,
    target: &'a Path,
}

/// Creates the directories and opens them, while the host's file system is visible.
pub fn open(volumes: &[DeclaredVolume]) -> Result<Vec<OpenVolume<'_>>, InnerError> {
    let open = |volume: &DeclaredVolume| {
        make_empty(&volume.dir)?;
        MountTree::copy(&volume.dir, false)
    };
    volumes
        .iter()
        .map(|volume| {
            let target = volume.target.as_path();
            let tree =
                open(volume).map_err(cannot(format!("create volume {}", target.display())))?;
            Ok(OpenVolume { tree, target })
        })
        .collect()
}

/// Removes files that a failed attempt left: they would conflict with the image's content.
fn make_empty(dir: &Path) -> std::io::Result<()> {
    linux::remove::tree(dir)?;
    std::fs::create_dir_all(dir)
}

/// Mounts the volumes and copies the image's content into them. The container's root must be entered already.
pub fn mount(volumes: &[OpenVolume<'_>]) -> Result<(), InnerError> {
    for OpenVolume { tree, target } in volumes {
        fill(tree, target).map_err(cannot(format!("fill volume {}", target.display())))?;
    }
    Ok(())
}

fn fill(tree: &MountTree, target: &Path) -> std::io::Result<()> {
    let of_image = match std::fs::metadata(target) {
        Ok(found) if found.is_dir() => Some(MountTree::copy(target, false)?),
        // A directory cannot be mounted on a file.
        Ok(_) => return Ok(()),
        Err(_) => None,
    };
    container::mount_at(tree, target)?;
    match of_image {
        Some(of_image) => linux::layer_merge::copy_directory(of_image.open()?, target).map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_is_empty_after_failed_attempt() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("volumes/0");
        for _ in 0..2 {
            make_empty(&dir).unwrap();
            std::fs::create_dir(dir.join("of-the-image")).unwrap();
        }
    }
}
