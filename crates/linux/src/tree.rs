//! Mounts that are created detached and attached later.
//!
//! The sources of a container's mounts are outside of its root, the mount points inside. Each source is opened while the outside
//! is still reachable, as a *detached* mount tree without a path. Then the process enters the container's root and attaches the
//! trees there, where no symbolic link of an image leads out.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

/// A detached mount tree.
#[derive(Debug)]
pub struct Tree(OwnedFd);

/// The mount propagation between a tree and the one it was copied from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// None.
    Private,
    /// From the outside in.
    Slave,
    /// Both ways.
    Shared,
}

impl AsFd for Tree {
    /// Its top as `O_PATH`, also after the tree is attached.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Tree {
    /// Copies the mount at `path`; with `recursive`, also the mounts below it.
    pub fn copy(path: &Path, recursive: bool) -> io::Result<Self> {
        Ok(Self(rustix::mount::open_tree(
            CWD,
            path,
            copy_flags(recursive),
        )?))
    }

    /// Like [`Tree::copy`], for an open file or directory.
    pub fn copy_open(file: impl AsFd, recursive: bool) -> io::Result<Self> {
        let flags = copy_flags(recursive) | OpenTreeFlags::AT_EMPTY_PATH;
        Ok(Self(rustix::mount::open_tree(file.as_fd(), "", flags)?))
    }

    /// A new file system of a type such as `tmpfs`, with options such as `("mode", "755")`.
    pub fn new(
        kind: &str,
        options: &[(&str, &str)],
        attributes: MountAttrFlags,
    ) -> io::Result<Self> {
        let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (name, value) in options {
            if value.is_empty() {
                rustix::mount::fsconfig_set_flag(context.as_fd(), *name)?;
            } else {
                rustix::mount::fsconfig_set_string(context.as_fd(), *name, *value)?;
            }
        }
        rustix::mount::fsconfig_create(context.as_fd())?;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        Ok(Self(rustix::mount::fsmount(
            context.as_fd(),
            flags,
            attributes,
        )?))
    }

    /// An overlay of the `lower` directories, the lowest first, and the writable layer `upper`. `work` must be an empty directory
    /// on the file system of `upper`.
    pub fn overlay(lower: &[impl AsRef<Path>], upper: &Path, work: &Path) -> io::Result<Self> {
        let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |name: &str, value: &Path| {
            rustix::mount::fsconfig_set_string(context.as_fd(), name, value)
        };
        rustix::mount::fsconfig_set_flag(context.as_fd(), "userxattr")?;
        // Add the layers one by one if the kernel supports it (6.5), because the string of a single option may not exceed 255
        // bytes. Older kernels accept any option name and fail at fsconfig_create.
        let one_by_one = lower
            .iter()
            .rev()
            .try_for_each(|layer| set("lowerdir+", layer.as_ref()))
            .and_then(|()| set("upperdir", upper))
            .and_then(|()| set("workdir", work))
            .and_then(|()| rustix::mount::fsconfig_create(context.as_fd()));
        if one_by_one.is_err() {
            return legacy_overlay(lower, upper, work);
        }
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        Ok(Self(rustix::mount::fsmount(
            context.as_fd(),
            flags,
            MountAttrFlags::MOUNT_ATTR_NODEV,
        )?))
    }

    /// A read-only overlay of the `lower` directories, the lowest first.
    pub fn overlay_read_only(lower: &[impl AsRef<Path>]) -> io::Result<Self> {
        if let [one] = lower {
            let tree = Self::copy(one.as_ref(), false)?;
            tree.read_only(false)?;
            return Ok(tree);
        }
        let open = || rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC);
        let mut context = open()?;
        let set = |context: &OwnedFd, name: &str, value: &Path| {
            rustix::mount::fsconfig_set_string(context.as_fd(), name, value)
        };
        rustix::mount::fsconfig_set_flag(context.as_fd(), "userxattr")?;
        let one_by_one = lower
            .iter()
            .rev()
            .try_for_each(|layer| set(&context, "lowerdir+", layer.as_ref()))
            .and_then(|()| rustix::mount::fsconfig_create(context.as_fd()));
        if one_by_one.is_err() {
            // As in `legacy_overlay`; fourteen of the short names fit.
            let (_open, names) = short_names(lower)?;
            context = open()?;
            rustix::mount::fsconfig_set_flag(context.as_fd(), "userxattr")?;
            set(&context, "lowerdir", Path::new(&names))?;
            rustix::mount::fsconfig_create(context.as_fd())?;
        }
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_RDONLY;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        Ok(Self(rustix::mount::fsmount(
            context.as_fd(),
            flags,
            attributes,
        )?))
    }

    /// Makes the tree read-only; with `recursive`, also the mounts below it.
    pub fn read_only(&self, recursive: bool) -> io::Result<()> {
        set_attributes(&self.0, libc::MOUNT_ATTR_RDONLY, recursive)
    }

    /// Sets nodev on the tree.
    pub fn without_devices(&self) -> io::Result<()> {
        set_attributes(&self.0, libc::MOUNT_ATTR_NODEV, false)
    }

    /// Attaches the tree at `place`.
    pub fn put(&self, place: &Path) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(self.0.as_fd(), "", CWD, place, flags)?;
        Ok(())
    }

    /// Attaches the tree to an open file or directory.
    pub fn put_on(&self, place: impl AsFd) -> io::Result<()> {
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(self.0.as_fd(), "", place.as_fd(), "", flags)?;
        Ok(())
    }

    /// Opens its top, a directory, for reading.
    pub fn open(&self) -> io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.0, ".", flags, Mode::empty())?)
    }

    /// Whether its top is a directory.
    pub fn is_directory(&self) -> io::Result<bool> {
        let mode = rustix::fs::fstat(&self.0)?.st_mode;
        Ok(rustix::fs::FileType::from_raw_mode(mode).is_dir())
    }

    /// Sets the propagation of the tree and of the mounts below it.
    pub fn propagate(&self, how: Propagation) -> io::Result<()> {
        let propagation = match how {
            Propagation::Private => libc::MS_PRIVATE,
            Propagation::Slave => libc::MS_SLAVE,
            Propagation::Shared => libc::MS_SHARED,
        };
        mount_setattr(&self.0, 0, propagation, true)
    }
}

fn copy_flags(recursive: bool) -> OpenTreeFlags {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursive {
        flags | OpenTreeFlags::AT_RECURSIVE
    } else {
        flags
    }
}

/// For kernels before 6.5: one mount call, whose options must fit into a page. The layers are named by open descriptors because
/// their paths are long.
fn legacy_overlay(lower: &[impl AsRef<Path>], upper: &Path, work: &Path) -> io::Result<Tree> {
    let (_open, names) = short_names(lower)?;
    let options = format!(
        "userxattr,lowerdir={names},upperdir={},workdir={}",
        upper.display(),
        work.display()
    );
    let options = std::ffi::CString::new(options)?;
    // The overlay needs a mount point for a moment; only we use the parent of the work directory.
    let place = work.with_file_name("merged");
    std::fs::create_dir_all(&place)?;
    let flags = rustix::mount::MountFlags::NODEV;
    rustix::mount::mount("overlay", &place, "overlay", flags, options.as_c_str())?;
    let tree = Tree::copy(&place, false);
    rustix::mount::unmount(&place, UnmountFlags::DETACH)?;
    tree
}

/// Opens the layers, and returns them with the list of their `/proc/self/fd` paths, the highest first.
fn short_names(lower: &[impl AsRef<Path>]) -> io::Result<(Vec<OwnedFd>, String)> {
    let open = |path: &Path| {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(path, flags, rustix::fs::Mode::empty())
    };
    let layers: Vec<OwnedFd> = lower
        .iter()
        .rev()
        .map(|layer| open(layer.as_ref()))
        .collect::<Result<_, _>>()?;
    let names: Vec<_> = layers
        .iter()
        .map(|layer| format!("/proc/self/fd/{}", layer.as_raw_fd()))
        .collect();
    Ok((layers, names.join(":")))
}

/// Turns `path`, with all mounts below, into a shared mount: later mounts propagate between it and its copies that stay shared.
pub fn share(path: &Path) -> io::Result<()> {
    let tree = Tree::copy(path, true)?;
    tree.propagate(Propagation::Shared)?;
    tree.put(path)
}

/// Makes `root` the root directory of this process and of its mount namespace, and unmounts all other mounts.
///
/// The kernel refuses if the current root is the rootfs; see [`lock_root`].
pub fn enter_root(root: &Tree, place: &Path) -> io::Result<()> {
    root.put(place)?;
    rustix::process::chdir(place)?;
    // pivot_root stacks the old root on the new one; unmount it there.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Whether the root directory is the rootfs of the mount namespace. On diskless nodes the initramfs may stay the root;
/// `pivot_root` cannot replace it.
pub fn root_is_first() -> io::Result<bool> {
    let root = crate::mounted::id(std::fs::File::open("/")?)?;
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    Ok(crate::mounted::parent(&mounts, root) == Some(root))
}

/// Mounts a recursive copy of the root directory on top of it, and moves this process, which must have a single thread, onto the
/// copy and into child user and mount namespaces.
///
/// `pivot_root` can replace the copy. In the new namespaces its mount is locked, because a more privileged namespace created it,
/// and `pivot_root` passes the lock on to each root that replaces it. So a process with all capabilities there can unmount
/// neither of them, and never reaches the rootfs below. A root that is merely moved over the rootfs is not locked.
pub fn lock_root() -> io::Result<()> {
    let copy = Tree::copy(Path::new("/"), true)?;
    copy.put(Path::new("/"))?;
    // By path the process would get the directory below the copy.
    rustix::process::fchdir(&copy.0)?;
    rustix::process::chroot(".")?;
    crate::namespace::enter_below(rustix::thread::UnshareFlags::NEWNS)
}

/// Makes the file system of the root directory read-only; the mounts below it do not change.
pub fn root_read_only() -> io::Result<()> {
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let root = rustix::fs::open("/", flags, rustix::fs::Mode::empty())?;
    set_attributes(&root, libc::MOUNT_ATTR_RDONLY, false)
}

fn set_attributes(file: &OwnedFd, attributes: u64, recursive: bool) -> io::Result<()> {
    mount_setattr(file, attributes, 0, recursive)
}

fn mount_setattr(file: &OwnedFd, set: u64, propagation: u64, recursive: bool) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: set,
        attr_clr: 0,
        propagation,
        userns_fd: 0,
    };
    let empty: &CStr = c"";
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a C string, the kernel reads one `mount_attr` of the size given, and both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            file.as_raw_fd(),
            empty.as_ptr(),
            flags,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::place::Kind;

    #[test]
    fn links_are_resolved_before_attaching() {
        let done = crate::testing::in_a_child(|| {
            crate::namespace::enter_as_root(UnshareFlags::NEWNS).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("root");
            std::fs::create_dir_all(root.join("var")).unwrap();
            for (link, to) in [("var/run", "/run"), ("resolv.conf", "none/there")] {
                std::os::unix::fs::symlink(to, root.join(link)).unwrap();
            }
            let memory = Tree::new("tmpfs", &[], MountAttrFlags::empty()).unwrap();
            let at = |path: &str, kind| crate::place::make(&root, Path::new(path), kind).unwrap();
            memory.put_on(at("/var/run", Kind::Directory)).unwrap();
            std::fs::write(root.join("run/file"), "of the tree").unwrap();
            let file = Tree::copy(&root.join("run/file"), false).unwrap();
            file.put_on(at("/resolv.conf", Kind::File)).unwrap();
            let shown = std::fs::read_to_string(root.join("resolv.conf")).unwrap();
            for place in ["none/there", "run"] {
                rustix::mount::unmount(root.join(place), UnmountFlags::DETACH).unwrap();
            }
            shown == "of the tree" && !root.join("run/file").exists()
        });
        assert!(done);
    }

    /// Tries how a container with all capabilities might unmount its root to reach the mounts below.
    #[test]
    fn locked_root_and_its_successors_cannot_be_unmounted() {
        let stayed = crate::testing::in_a_child(|| {
            let place = tempfile::tempdir().unwrap();
            crate::namespace::enter_as_root(UnshareFlags::NEWNS).unwrap();
            lock_root().unwrap();
            crate::mount::keep_to_ourselves().unwrap();
            assert!(!root_is_first().unwrap());
            let busy = || rustix::mount::unmount("/", UnmountFlags::DETACH).unwrap_err();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            let options = [("mode", "755")];
            let next = Tree::new("tmpfs", &options, MountAttrFlags::empty()).unwrap();
            enter_root(&next, place.path()).unwrap();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            std::fs::create_dir("/away").unwrap();
            let moved = rustix::mount::mount_move("/", "/away");
            assert_eq!(moved, Err(rustix::io::Errno::INVAL));
            // A later root is locked too.
            let last = Tree::new("tmpfs", &options, MountAttrFlags::empty()).unwrap();
            enter_root(&last, Path::new("/away")).unwrap();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            std::fs::read_dir("/").unwrap().count() == 0
        });
        assert!(stayed);
    }
}
