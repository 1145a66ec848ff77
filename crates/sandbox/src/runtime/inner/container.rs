//! Turns a forked process into a container: mounts, root file system, devices.
//!
//! An image is untrusted. Mounts are opened while the host's file system is visible and attached after the container's root has
//! been entered, so symbolic links of the image cannot lead out of it.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use linux::mount_target::TargetKind;
use linux::mount_tree::{self, MountTree};
use rustix::fs::FileType;
use rustix::mount::MountAttrFlags;

use super::error::{InnerError, cannot};
use super::message::{
    ContainerPlan, MountAccess, MountPlan, MountPropagation, MountSource, RootfsKind, RootfsPlan,
};
use super::{declared_volume, terminal};

const NOSUID_NODEV_NOEXEC: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// Builds the container's file system and enters it. If the container has a terminal, opens it and returns the master side.
pub fn enter_rootfs(plan: &ContainerPlan) -> Result<Option<OwnedFd>, InnerError> {
    let beside = plan.root.upper.parent().unwrap_or(Path::new("/"));
    let mount_point = beside.join("root");
    std::fs::create_dir_all(&mount_point)
        .map_err(cannot(format!("create {}", mount_point.display())))?;
    let trees = plan
        .mounts
        .iter()
        .map(|mount| {
            open(mount, &mount_point).map_err(cannot(format!("mount {}", mount.target.display())))
        })
        .collect::<Result<Vec<_>, InnerError>>()?;
    // The host's /dev/null: in the container, that path may be a link to something that it must not see.
    let covers = plan
        .masked_paths
        .iter()
        .map(|_| MountTree::copy(Path::new("/dev/null"), false));
    let covers = covers
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(cannot("open /dev/null"))?;
    let volumes = declared_volume::open(&plan.declared_volumes)?;
    // Mounts made from here on must not propagate to the host, whose mounts may be shared.
    linux::mount::make_all_slave().map_err(cannot("make mounts private"))?;
    enter_root(&plan.root, beside, &mount_point)?;
    if plan.process.user.single_id {
        disable_apt_sandbox_user();
    }
    declared_volume::mount(&volumes)?;
    for (mount, tree) in plan.mounts.iter().zip(&trees) {
        mount_at(tree, &mount.target)
            .map_err(cannot(format!("mount {}", mount.target.display())))?;
    }
    for (link, target) in &plan.links {
        // Ignore the error: the image may have a file at this path.
        let _ = rustix::fs::symlink(target, link);
    }
    let mounted = MountedTrees(&plan.mounts, &trees);
    for (path, cover) in plan.masked_paths.iter().zip(covers) {
        mounted
            .open(path)
            .and_then(|found| found.map_or(Ok(()), |found| mask(found, cover)))
            .map_err(cannot(format!("mask {}", path.display())))?;
    }
    for path in &plan.readonly_paths {
        mounted
            .open(path)
            .and_then(|found| found.map_or(Ok(()), make_read_only))
            .map_err(cannot(format!("make {} read-only", path.display())))?;
    }
    drop(trees);
    let master = plan
        .process
        .terminal
        .then(terminal::open)
        .transpose()
        .map_err(cannot("open a terminal"))?;
    if master.is_some() {
        mount_console().map_err(cannot("mount /dev/console"))?;
    }
    if plan.root.read_only {
        mount_tree::set_root_read_only().map_err(cannot("make the root file system read-only"))?;
    }
    Ok(master)
}

/// apt switches to another user before it downloads, and checks that it succeeded, which it cannot with a single id. This option
/// turns that off. Written before volumes are mounted, so that the file is in the container's own root.
fn disable_apt_sandbox_user() {
    let dir = Path::new("/etc/apt/apt.conf.d");
    if dir.is_dir() {
        let text = "// This container has one user id only.\nAPT::Sandbox::User \"root\";\n";
        // Only a new file: an existing one may be a pipe, on which opening would block. The error is ignored, because the
        // container may not need apt.
        let _ = File::create_new(dir.join("99-single-id"))
            .and_then(|mut file| file.write_all(text.as_bytes()));
    }
}

/// Mounts the terminal, which is standard input by now, on /dev/console.
fn mount_console() -> std::io::Result<()> {
    let tree = MountTree::copy_open(rustix::stdio::stdin(), false)?;
    mount_at(&tree, Path::new("/dev/console"))
}

fn enter_root(plan: &RootfsPlan, beside: &Path, mount_point: &Path) -> Result<(), InnerError> {
    let root = match &plan.kind {
        RootfsKind::Overlay => {
            let work = beside.join("work");
            for dir in [&plan.upper, &work] {
                std::fs::create_dir_all(dir)
                    .map_err(cannot(format!("create {}", dir.display())))?;
            }
            MountTree::overlay(&plan.layers, &plan.upper, &work)
        }
        RootfsKind::Mounted(path) => bind_root(path),
        RootfsKind::Copy => copy_root(&plan.layers, beside, mount_point),
    };
    let root = root.map_err(cannot("mount the image"))?;
    mount_tree::pivot_root(&root, mount_point).map_err(cannot("enter the image"))
}

fn bind_root(path: &Path) -> std::io::Result<MountTree> {
    let tree = MountTree::copy(path, false)?;
    tree.set_nodev()?;
    Ok(tree)
}

/// Copies the layers in the container's own process, because copying blocks for long.
fn copy_root(layers: &[PathBuf], beside: &Path, target: &Path) -> std::io::Result<MountTree> {
    // A failed attempt may have left files.
    linux::remove::tree(target)?;
    std::fs::create_dir(target)?;
    let copied_bytes = linux::layer_merge::merge_layers(layers, target)?;
    std::fs::write(beside.join("copied"), copied_bytes.to_string())?;
    bind_root(target)
}

/// Opens the source of a mount; `scratch` is an empty directory for temporary use.
fn open(mount: &MountPlan, scratch: &Path) -> std::io::Result<MountTree> {
    let tree = match &mount.source {
        MountSource::Bind {
            path,
            sub_path: None,
        } => MountTree::copy(path, true)?,
        MountSource::Bind {
            path,
            sub_path: Some(sub),
        } => MountTree::copy_open(open_sub_path(path, sub)?, true)?,
        MountSource::Layers { layers, sub_path } => {
            return image_tree(layers, sub_path.as_deref(), scratch);
        }
        MountSource::Tmpfs(options) => {
            let options: Vec<(&str, &str)> = options
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
            MountTree::new("tmpfs", &options, attributes)?
        }
        MountSource::Proc => MountTree::new("proc", &[], NOSUID_NODEV_NOEXEC)?,
        MountSource::Sys => MountTree::new("sysfs", &[], NOSUID_NODEV_NOEXEC)?,
        MountSource::Cgroup => MountTree::new("cgroup2", &[], NOSUID_NODEV_NOEXEC)?,
        MountSource::Mqueue => MountTree::new("mqueue", &[], NOSUID_NODEV_NOEXEC)?,
        MountSource::Pts => devpts()?,
    };
    match mount.propagation {
        MountPropagation::None => tree.set_propagation(mount_tree::Propagation::Private)?,
        MountPropagation::HostToContainer => {
            tree.set_propagation(mount_tree::Propagation::Slave)?
        }
        // Shared with the pod's other containers: the runtime made the volume a shared mount. Mounts of the host propagate in,
        // but none propagate back, because an ordinary user cannot change the host's mounts.
        MountPropagation::Bidirectional => tree.set_propagation(mount_tree::Propagation::Shared)?,
    }
    match mount.access {
        MountAccess::ReadWrite => {}
        MountAccess::ReadOnly => tree.set_read_only(false)?,
        MountAccess::RecursiveReadOnly => tree.set_read_only(true)?,
    }
    Ok(tree)
}

/// An image as a read-only volume: its merged layers, or a path below them.
fn image_tree(
    layers: &[PathBuf],
    sub: Option<&Path>,
    scratch: &Path,
) -> std::io::Result<MountTree> {
    let tree = MountTree::overlay_read_only(layers)?;
    let Some(sub) = sub else {
        return Ok(tree);
    };
    // Before Linux 6.15 open_tree() cannot clone a part of a detached mount.
    tree.attach(scratch)?;
    let part = linux::subpath::open(scratch, &sub.to_string_lossy(), false)
        .map_err(std::io::Error::other)
        .and_then(|part| MountTree::copy_open(part, false));
    linux::mount::detach(scratch)?;
    let part = part?;
    part.set_read_only(false)?;
    Ok(part)
}

/// Group 5 owns terminals on all distributions. With a single id that group does not exist.
fn devpts() -> std::io::Result<MountTree> {
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let options = [
        ("newinstance", ""),
        ("ptmxmode", "0666"),
        ("mode", "0620"),
        ("gid", "5"),
    ];
    MountTree::new("devpts", &options, attributes)
        .or_else(|_| MountTree::new("devpts", &options[..3], attributes))
}

/// Opens `sub` below `volume`, never outside of it. Creates missing directories.
fn open_sub_path(volume: &Path, sub: &Path) -> std::io::Result<OwnedFd> {
    linux::subpath::open(volume, &sub.to_string_lossy(), true).map_err(std::io::Error::other)
}

/// Mounts a tree at `target`, which is created if missing.
pub(super) fn mount_at(tree: &MountTree, target: &Path) -> std::io::Result<()> {
    let kind = if tree.is_directory()? {
        TargetKind::Directory
    } else {
        TargetKind::File
    };
    tree.attach_to(linux::mount_target::open_or_create(
        Path::new("/"),
        target,
        kind,
    )?)
}

/// The container's mounts, with their trees.
struct MountedTrees<'a>(&'a [MountPlan], &'a [MountTree]);

impl MountedTrees<'_> {
    /// Opens `path` in the mount that contains it; `None` if it does not exist. The path is resolved below the mount's own
    /// descriptor, so that neither links of the image nor containers that share a volume can redirect it.
    fn open(&self, path: &Path) -> std::io::Result<Option<OwnedFd>> {
        let newest_first = self.0.iter().zip(self.1).rev();
        let mut below = newest_first.filter_map(|(mount, tree)| {
            let rest = path.strip_prefix(&mount.target).ok()?;
            Some((tree, rest))
        });
        // A later mount covers earlier ones.
        match below.next() {
            Some((tree, rest)) => linux::mount_target::open_beneath(tree, rest),
            None => Ok(None),
        }
    }
}

/// Covers a directory with an empty one, and a file with `cover`.
fn mask(path: OwnedFd, cover: MountTree) -> std::io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&path)?.st_mode);
    if !kind.is_dir() {
        return cover.attach_to(path);
    }
    let empty = MountTree::new(
        "tmpfs",
        &[("size", "0"), ("mode", "555")],
        NOSUID_NODEV_NOEXEC,
    )?;
    empty.set_read_only(false)?;
    empty.attach_to(path)
}

fn make_read_only(path: OwnedFd) -> std::io::Result<()> {
    let tree = MountTree::copy_open(&path, true)?;
    tree.set_read_only(true)?;
    tree.attach_to(path)
}
