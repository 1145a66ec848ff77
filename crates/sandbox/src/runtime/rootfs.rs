//! Root file systems of containers, and image volumes, by snapshotter.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::inner::message::RootfsKind;
use super::snapshotter::{FuseMount, UpperDir};
use super::{LinuxRuntime, Snapshotter};
use crate::container_runtime::StartRequest;
use crate::node_services::{NodeServices, ReadyVolume};

impl<S: NodeServices> LinuxRuntime<S> {
    /// How the inner process creates the root file system of a container.
    pub(super) fn rootfs_kind(&self, request: &StartRequest) -> RootfsKind {
        match self.snapshotter {
            Snapshotter::Overlay => RootfsKind::Overlay,
            Snapshotter::FuseOverlayfs(_) => RootfsKind::Mounted(self.fuse_root(request)),
            Snapshotter::Copy => RootfsKind::Copy,
        }
    }

    /// Where fuse-overlayfs mounts the root file system of a container.
    pub(super) fn fuse_root(&self, request: &StartRequest) -> PathBuf {
        let name = format!("{}-{}", request.container.name, request.attempt);
        self.dirs.memory.join("roots").join(name)
    }

    /// Mounts a container's root file system with fuse-overlayfs, if that is the snapshotter.
    pub(super) async fn mount_fuse_root(
        &self,
        request: &StartRequest,
        dir: &Path,
    ) -> std::io::Result<()> {
        let Snapshotter::FuseOverlayfs(program) = &self.snapshotter else {
            return Ok(());
        };
        let mount_point = self.fuse_root(request);
        unmount_fuse(&self.fuse_mounts, &mount_point).await;
        let (upper, work) = (dir.join("upper"), dir.join("work"));
        std::fs::create_dir_all(&upper)?;
        std::fs::create_dir_all(&work)?;
        let upper = UpperDir {
            upper: &upper,
            work: &work,
        };
        let layers = &request.image.layers;
        let mount = FuseMount::new(program, layers, Some(upper), &mount_point).await?;
        self.fuse_mounts.borrow_mut().insert(mount_point, mount);
        Ok(())
    }

    /// Merges the layers of an image volume into one directory, unless the kernel's overlayfs does that at the mount.
    pub(super) async fn merge_layers(
        &self,
        name: &str,
        volume: ReadyVolume,
    ) -> std::io::Result<ReadyVolume> {
        let layers = match volume {
            ReadyVolume::Layers(layers) if layers.len() > 1 => layers,
            other => return Ok(other),
        };
        let merged = match &self.snapshotter {
            Snapshotter::Overlay => return Ok(ReadyVolume::Layers(layers)),
            Snapshotter::FuseOverlayfs(program) => {
                let mount_point = self.dirs.memory.join("images").join(name);
                let mount = FuseMount::new(program, &layers, None, &mount_point).await?;
                let mut mounts = self.fuse_mounts.borrow_mut();
                mounts.insert(mount_point.clone(), mount);
                mount_point
            }
            Snapshotter::Copy => {
                let target = self.dirs.disk.join("images").join(name);
                let path = target.clone();
                let copied = tokio::task::spawn_blocking(move || copy_image(&layers, &path));
                copied.await.map_err(std::io::Error::other)??;
                target
            }
        };
        Ok(ReadyVolume::Layers(vec![merged]))
    }
}

/// Unmounts fuse-overlayfs from `mount_point`, if it is mounted.
pub(super) async fn unmount_fuse(
    mounts: &RefCell<HashMap<PathBuf, FuseMount>>,
    mount_point: &Path,
) {
    let mount = mounts.borrow_mut().remove(mount_point);
    if let Some(mount) = mount {
        mount.unmount().await;
    }
}

fn copy_image(layers: &[PathBuf], target: &Path) -> std::io::Result<()> {
    // A failed attempt may have left files.
    linux::remove::tree(target)?;
    std::fs::create_dir_all(target)?;
    linux::layer_merge::merge_layers(layers, target).map(drop)
}
