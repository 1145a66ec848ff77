//! A forked process becomes a container: mounts, root, devices, then the program.
//!
//! Nothing of an image is trusted. Mounts are opened while the outside is visible and put in place after the container's
//! root has become ours, so that links in it lead nowhere else.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use linux::place::Kind;
use linux::tree::{self, Tree};
use rustix::fs::FileType;
use rustix::mount::MountAttrFlags;

use super::failure::{Failure, failed};
use super::message::{
    Access, ContainerPlan, MountPlan, MountSource, Propagation, RootKind, RootPlan,
};
use super::{image_volume, terminal};

const PLAIN: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// Builds the container's file system and moves into it. If it has a terminal, opens that and gives back its master side.
pub fn move_in(plan: &ContainerPlan) -> Result<Option<OwnedFd>, Failure> {
    let beside = plan.root.upper.parent().unwrap_or(Path::new("/"));
    let place = beside.join("root");
    std::fs::create_dir_all(&place).map_err(failed(format!("making {}", place.display())))?;
    let trees = plan
        .mounts
        .iter()
        .map(|mount| {
            open(mount, &place).map_err(failed(format!("mounting {}", mount.target.display())))
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    // Of the host: what the container has there may be a link to something that it should not have.
    let covers = plan
        .masked
        .iter()
        .map(|_| Tree::copy(Path::new("/dev/null"), false));
    let covers = covers
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(failed("opening /dev/null"))?;
    let volumes = image_volume::open(&plan.image_volumes)?;
    // What we do from here on in our copy of the outside is not to be seen there, where mounts may be shared.
    linux::mount::follow_outside().map_err(failed("mounts that stay our own"))?;
    enter_root(&plan.root, beside, &place)?;
    if plan.process.user.one_id {
        keep_apt_from_changing_users();
    }
    image_volume::put(&volumes)?;
    for (mount, tree) in plan.mounts.iter().zip(&trees) {
        put(tree, &mount.target).map_err(failed(format!("mounting {}", mount.target.display())))?;
    }
    for (from, to) in &plan.links {
        // An image may have its own.
        let _ = rustix::fs::symlink(to, from);
    }
    let mounted = Mounted(&plan.mounts, &trees);
    for (path, cover) in plan.masked.iter().zip(covers) {
        mounted
            .find(path)
            .and_then(|found| found.map_or(Ok(()), |found| mask(found, cover)))
            .map_err(failed(format!("hiding {}", path.display())))?;
    }
    for path in &plan.read_only_paths {
        mounted
            .find(path)
            .and_then(|found| found.map_or(Ok(()), protect))
            .map_err(failed(format!("protecting {}", path.display())))?;
    }
    drop(trees);
    let master = plan
        .process
        .terminal
        .then(terminal::open)
        .transpose()
        .map_err(failed("opening a terminal"))?;
    if master.is_some() {
        console().map_err(failed("mounting /dev/console"))?;
    }
    if plan.root.read_only {
        tree::root_read_only().map_err(failed("making the root file system read-only"))?;
    }
    Ok(master)
}

/// apt makes sure that it has become another user before it fetches anything, which nobody can with a single id. Images
/// that have it are told not to try. Before volumes are there: this file is the container's own.
fn keep_apt_from_changing_users() {
    let dir = Path::new("/etc/apt/apt.conf.d");
    if dir.is_dir() {
        let text = "// This container has one user id only.\nAPT::Sandbox::User \"root\";\n";
        // Only a new one: what an image has there may be a pipe, at which one would wait for ever. A container that can do
        // without apt goes on without this.
        let _ = File::create_new(dir.join("99-single-id"))
            .and_then(|mut file| file.write_all(text.as_bytes()));
    }
}

/// The terminal of a container's first process, which is its standard input by now, is its console.
fn console() -> std::io::Result<()> {
    let tree = Tree::copy_open(rustix::stdio::stdin(), false)?;
    put(&tree, Path::new("/dev/console"))
}

fn enter_root(plan: &RootPlan, beside: &Path, place: &Path) -> Result<(), Failure> {
    let root = match &plan.kind {
        RootKind::Overlay => {
            let work = beside.join("work");
            for dir in [&plan.upper, &work] {
                std::fs::create_dir_all(dir)
                    .map_err(failed(format!("making {}", dir.display())))?;
            }
            Tree::overlay(&plan.layers, &plan.upper, &work)
        }
        RootKind::At(shown) => shown_root(shown),
        RootKind::Copy => copied_root(&plan.layers, beside, place),
    };
    let root = root.map_err(failed("mounting the image"))?;
    tree::enter_root(&root, place).map_err(failed("entering the image"))
}

fn shown_root(shown: &Path) -> std::io::Result<Tree> {
    let tree = Tree::copy(shown, false)?;
    tree.without_devices()?;
    Ok(tree)
}

/// Only a process of its own may take the time that copying takes; this one is the container's.
fn copied_root(layers: &[PathBuf], beside: &Path, place: &Path) -> std::io::Result<Tree> {
    // What an attempt that failed has left.
    linux::remove::tree(place)?;
    std::fs::create_dir(place)?;
    let taken = linux::stack::copy(layers, place)?;
    std::fs::write(beside.join("copied"), taken.to_string())?;
    shown_root(place)
}

/// Opens what is mounted; `place` is an empty directory to use for a moment.
fn open(mount: &MountPlan, place: &Path) -> std::io::Result<Tree> {
    let tree = match &mount.source {
        MountSource::Bind {
            path,
            sub_path: None,
        } => Tree::copy(path, true)?,
        MountSource::Bind {
            path,
            sub_path: Some(sub),
        } => Tree::copy_open(below(path, sub)?, true)?,
        MountSource::Layers { layers, sub_path } => {
            return layers_tree(layers, sub_path.as_deref(), place);
        }
        MountSource::Tmpfs(options) => {
            let options: Vec<(&str, &str)> = options
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
            Tree::new("tmpfs", &options, attributes)?
        }
        MountSource::Proc => Tree::new("proc", &[], PLAIN)?,
        MountSource::Sys => Tree::new("sysfs", &[], PLAIN)?,
        MountSource::Cgroup => Tree::new("cgroup2", &[], PLAIN)?,
        MountSource::Mqueue => Tree::new("mqueue", &[], PLAIN)?,
        MountSource::Pts => pts()?,
    };
    match mount.propagation {
        Propagation::None => tree.propagate(tree::Propagation::Private)?,
        Propagation::HostToContainer => tree.propagate(tree::Propagation::Slave)?,
        // Between the containers of the pod, whose runtime has made the volume one that is shared. The host gives, and
        // gets nothing back: its mounts are not ours to change.
        Propagation::Bidirectional => tree.propagate(tree::Propagation::Shared)?,
    }
    match mount.access {
        Access::Write => {}
        Access::Read => tree.read_only(false)?,
        Access::ReadAll => tree.read_only(true)?,
    }
    Ok(tree)
}

/// An image as a volume: its layers, or a part of what they show, to be read.
fn layers_tree(layers: &[PathBuf], sub: Option<&Path>, place: &Path) -> std::io::Result<Tree> {
    let tree = Tree::overlay_read_only(layers)?;
    let Some(sub) = sub else {
        return Ok(tree);
    };
    // Before Linux 6.15 nothing can be taken from a tree that is in no place.
    tree.put(place)?;
    let part = linux::subpath::open(place, &sub.to_string_lossy(), false)
        .map_err(std::io::Error::other)
        .and_then(|part| Tree::copy_open(part, false));
    linux::mount::detach(place)?;
    let part = part?;
    part.read_only(false)?;
    Ok(part)
}

/// The group that owns terminals is 5 everywhere; with a single id there is no such group.
fn pts() -> std::io::Result<Tree> {
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let options = [
        ("newinstance", ""),
        ("ptmxmode", "0666"),
        ("mode", "0620"),
        ("gid", "5"),
    ];
    Tree::new("devpts", &options, attributes)
        .or_else(|_| Tree::new("devpts", &options[..3], attributes))
}

/// What is at `sub` below `volume`, never outside of it; directories that are missing are made.
fn below(volume: &Path, sub: &Path) -> std::io::Result<OwnedFd> {
    linux::subpath::open(volume, &sub.to_string_lossy(), true).map_err(std::io::Error::other)
}

/// Puts a tree in its place, which is made if it is missing.
pub(super) fn put(tree: &Tree, target: &Path) -> std::io::Result<()> {
    let kind = if tree.is_directory()? {
        Kind::Directory
    } else {
        Kind::File
    };
    tree.put_on(linux::place::make(Path::new("/"), target, kind)?)
}

/// The container's mounts, and the trees that were put in their places.
struct Mounted<'a>(&'a [MountPlan], &'a [Tree]);

impl Mounted<'_> {
    /// Opens what is at `path`, if there is something, in the tree that shows it: by names below the tree's own descriptor,
    /// so that neither links of the image nor other containers that share a volume lead elsewhere.
    fn find(&self, path: &Path) -> std::io::Result<Option<OwnedFd>> {
        let holding = self.0.iter().zip(self.1).rev();
        let mut below = holding.filter_map(|(mount, tree)| {
            let rest = path.strip_prefix(&mount.target).ok()?;
            Some((tree, rest))
        });
        // The last one covers those before it.
        match below.next() {
            Some((tree, rest)) => linux::place::beneath(tree, rest),
            None => Ok(None),
        }
    }
}

/// Shows an empty directory, or `cover`, instead.
fn mask(place: OwnedFd, cover: Tree) -> std::io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode);
    if !kind.is_dir() {
        return cover.put_on(place);
    }
    let empty = Tree::new("tmpfs", &[("size", "0"), ("mode", "555")], PLAIN)?;
    empty.read_only(false)?;
    empty.put_on(place)
}

fn protect(place: OwnedFd) -> std::io::Result<()> {
    let tree = Tree::copy_open(&place, true)?;
    tree.read_only(true)?;
    tree.put_on(place)
}
