//! A container's root file system, and images that are volumes, by each way of stacking layers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::stacking::{Changes, Mounted};
use super::{LinuxRuntime, Stacking};
use crate::inner::message::RootKind;
use crate::seams::{StartRequest, Volume, World};

impl<W: World> LinuxRuntime<W> {
    /// How the root file system of a container is made.
    pub(super) fn root_kind(&self, request: &StartRequest) -> RootKind {
        match self.stacking {
            Stacking::Overlay => RootKind::Overlay,
            Stacking::Fuse(_) => RootKind::At(self.root_place(request)),
            Stacking::Copy => RootKind::Copy,
        }
    }

    /// Where fuse-overlayfs shows it.
    pub(super) fn root_place(&self, request: &StartRequest) -> PathBuf {
        let name = format!("{}-{}", request.container.name, request.attempt);
        self.places.memory.join("roots").join(name)
    }

    /// Has fuse-overlayfs show a container's root file system, if that is how it is made here.
    pub(super) async fn show_root(
        &self,
        request: &StartRequest,
        dir: &Path,
    ) -> std::io::Result<()> {
        let Stacking::Fuse(program) = &self.stacking else {
            return Ok(());
        };
        let place = self.root_place(request);
        hide(&self.shown, &place).await;
        let (upper, work) = (dir.join("upper"), dir.join("work"));
        std::fs::create_dir_all(&upper)?;
        std::fs::create_dir_all(&work)?;
        let changes = Changes {
            upper: &upper,
            work: &work,
        };
        let mounted = Mounted::new(program, &request.image.layers, Some(changes), &place).await?;
        self.shown.borrow_mut().insert(place, mounted);
        Ok(())
    }

    /// An image as a volume, where the kernel doesn't stack its layers.
    pub(super) async fn one_directory(
        &self,
        name: &str,
        volume: Volume,
    ) -> std::io::Result<Volume> {
        let layers = match volume {
            Volume::Layers(layers) if layers.len() > 1 => layers,
            other => return Ok(other),
        };
        let place = match &self.stacking {
            Stacking::Overlay => return Ok(Volume::Layers(layers)),
            Stacking::Fuse(program) => {
                let place = self.places.memory.join("images").join(name);
                let mounted = Mounted::new(program, &layers, None, &place).await?;
                self.shown.borrow_mut().insert(place.clone(), mounted);
                place
            }
            Stacking::Copy => {
                let place = self.places.disk.join("images").join(name);
                let target = place.clone();
                let copied = tokio::task::spawn_blocking(move || copy_image(&layers, &target));
                copied.await.map_err(std::io::Error::other)??;
                place
            }
        };
        Ok(Volume::Layers(vec![place]))
    }
}

/// Takes away what fuse-overlayfs shows at `place`, if it does.
pub(super) async fn hide(shown: &RefCell<HashMap<PathBuf, Mounted>>, place: &Path) {
    let mounted = shown.borrow_mut().remove(place);
    if let Some(mounted) = mounted {
        mounted.end().await;
    }
}

fn copy_image(layers: &[PathBuf], place: &Path) -> std::io::Result<()> {
    // What an attempt that failed has left.
    linux::remove::tree(place)?;
    std::fs::create_dir_all(place)?;
    linux::stack::copy(layers, place).map(drop)
}
