//! Directories that an image declares as volumes (VOLUME): the container's own, and writable whatever its root is.

use std::path::Path;

use linux::tree::Tree;

use super::container;
use super::failure::{Failure, failed};
use super::message::ImageVolume;

/// One that is still in no place.
pub struct Opened<'a> {
    tree: Tree,
    target: &'a Path,
}

/// Makes the directories, while the outside is visible.
pub fn open(volumes: &[ImageVolume]) -> Result<Vec<Opened<'_>>, Failure> {
    let open = |volume: &ImageVolume| {
        make_empty(&volume.dir)?;
        Tree::copy(&volume.dir, false)
    };
    volumes
        .iter()
        .map(|volume| {
            let target = volume.target.as_path();
            let tree =
                open(volume).map_err(failed(format!("making the volume {}", target.display())))?;
            Ok(Opened { tree, target })
        })
        .collect()
}

/// Takes away what an attempt that failed has left, which would be in the way of what the image has.
fn make_empty(dir: &Path) -> std::io::Result<()> {
    linux::remove::tree(dir)?;
    std::fs::create_dir_all(dir)
}

/// Puts them in place, with what the image has there. The container's root must be ours by now.
pub fn put(volumes: &[Opened<'_>]) -> Result<(), Failure> {
    for Opened { tree, target } in volumes {
        fill(tree, target).map_err(failed(format!("filling the volume {}", target.display())))?;
    }
    Ok(())
}

fn fill(tree: &Tree, target: &Path) -> std::io::Result<()> {
    let of_image = match std::fs::metadata(target) {
        Ok(found) if found.is_dir() => Some(Tree::copy(target, false)?),
        // A file in its place is left alone, as nothing could be mounted there.
        Ok(_) => return Ok(()),
        Err(_) => None,
    };
    container::put(tree, target)?;
    match of_image {
        Some(of_image) => linux::stack::copy_directory(of_image.open()?, target).map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_begins_empty_also_after_an_attempt_that_failed() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("volumes/0");
        for _ in 0..2 {
            make_empty(&dir).unwrap();
            std::fs::create_dir(dir.join("of-the-image")).unwrap();
        }
    }
}
