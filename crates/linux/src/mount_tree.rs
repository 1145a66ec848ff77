//! Detached mount trees (`open_tree`, `fsmount`), and the root of the mount namespace.
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
pub struct MountTree(OwnedFd);

/// The mount propagation between a tree and the mounts that it was copied from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// No mounts propagate.
    Private,
    /// New mounts propagate from the original to the copy only.
    Slave,
    /// New mounts propagate both ways.
    Shared,
}

impl AsFd for MountTree {
    /// The root of the tree as `O_PATH`. It stays valid after the tree is attached.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl MountTree {
    /// Copies the mount at `path`; with `recursive`, also the mounts below it.
    pub fn copy(path: &Path, recursive: bool) -> io::Result<Self> {
        Ok(Self(rustix::mount::open_tree(
            CWD,
            path,
            copy_flags(recursive),
        )?))
    }

    /// Like [`MountTree::copy`], for an open file or directory.
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
        Self::from_context(&context, attributes)
    }

    /// The tree of a file system that was configured.
    fn from_context(context: &OwnedFd, attributes: MountAttrFlags) -> io::Result<Self> {
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        let tree = rustix::mount::fsmount(context.as_fd(), flags, attributes)?;
        Ok(Self(tree))
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
        let created = lower
            .iter()
            .rev()
            .try_for_each(|layer| set("lowerdir+", layer.as_ref()))
            .and_then(|()| set("upperdir", upper))
            .and_then(|()| set("workdir", work))
            .and_then(|()| rustix::mount::fsconfig_create(context.as_fd()));
        if created.is_err() {
            return overlay_by_mount_call(lower, upper, work);
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
            tree.set_read_only(false)?;
            return Ok(tree);
        }
        let open = || rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC);
        let mut context = open()?;
        let set = |context: &OwnedFd, name: &str, value: &Path| {
            rustix::mount::fsconfig_set_string(context.as_fd(), name, value)
        };
        rustix::mount::fsconfig_set_flag(context.as_fd(), "userxattr")?;
        let created = lower
            .iter()
            .rev()
            .try_for_each(|layer| set(&context, "lowerdir+", layer.as_ref()))
            .and_then(|()| rustix::mount::fsconfig_create(context.as_fd()));
        if created.is_err() {
            // As in `overlay_by_mount_call`; fourteen of the short paths fit.
            let (_open, paths) = descriptor_paths(lower)?;
            context = open()?;
            rustix::mount::fsconfig_set_flag(context.as_fd(), "userxattr")?;
            set(&context, "lowerdir", Path::new(&paths))?;
            rustix::mount::fsconfig_create(context.as_fd())?;
        }
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_RDONLY;
        Self::from_context(&context, attributes)
    }

    /// Makes the tree read-only; with `recursive`, also the mounts below it.
    pub fn set_read_only(&self, recursive: bool) -> io::Result<()> {
        set_attributes(&self.0, libc::MOUNT_ATTR_RDONLY, recursive)
    }

    /// Sets nodev on the tree.
    pub fn set_nodev(&self) -> io::Result<()> {
        set_attributes(&self.0, libc::MOUNT_ATTR_NODEV, false)
    }

    /// Attaches the tree at `target`.
    pub fn attach(&self, target: &Path) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(self.0.as_fd(), "", CWD, target, flags)?;
        Ok(())
    }

    /// Attaches the tree to an open file or directory.
    pub fn attach_to(&self, target: impl AsFd) -> io::Result<()> {
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(self.0.as_fd(), "", target.as_fd(), "", flags)?;
        Ok(())
    }

    /// Opens the root of the tree, a directory, for reading.
    pub fn open(&self) -> io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.0, ".", flags, Mode::empty())?)
    }

    /// Whether the root of the tree is a directory.
    pub fn is_directory(&self) -> io::Result<bool> {
        let mode = rustix::fs::fstat(&self.0)?.st_mode;
        Ok(rustix::fs::FileType::from_raw_mode(mode).is_dir())
    }

    /// Sets the propagation of the tree and of the mounts below it.
    pub fn set_propagation(&self, propagation: Propagation) -> io::Result<()> {
        let flag = match propagation {
            Propagation::Private => libc::MS_PRIVATE,
            Propagation::Slave => libc::MS_SLAVE,
            Propagation::Shared => libc::MS_SHARED,
        };
        mount_setattr(&self.0, 0, flag, true)
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
fn overlay_by_mount_call(
    lower: &[impl AsRef<Path>],
    upper: &Path,
    work: &Path,
) -> io::Result<MountTree> {
    let (_open, paths) = descriptor_paths(lower)?;
    let options = format!(
        "userxattr,lowerdir={paths},upperdir={},workdir={}",
        upper.display(),
        work.display()
    );
    let options = std::ffi::CString::new(options)?;
    // mount needs a mount point; no other process uses the parent of the work directory.
    let merged = work.with_file_name("merged");
    std::fs::create_dir_all(&merged)?;
    let flags = rustix::mount::MountFlags::NODEV;
    rustix::mount::mount("overlay", &merged, "overlay", flags, options.as_c_str())?;
    let tree = MountTree::copy(&merged, false);
    rustix::mount::unmount(&merged, UnmountFlags::DETACH)?;
    tree
}

/// Opens the layers, and returns them with the list of their `/proc/self/fd` paths, the highest first.
fn descriptor_paths(lower: &[impl AsRef<Path>]) -> io::Result<(Vec<OwnedFd>, String)> {
    let open = |path: &Path| {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(path, flags, rustix::fs::Mode::empty())
    };
    let layers: Vec<OwnedFd> = lower
        .iter()
        .rev()
        .map(|layer| open(layer.as_ref()))
        .collect::<Result<_, _>>()?;
    let paths: Vec<_> = layers
        .iter()
        .map(|layer| format!("/proc/self/fd/{}", layer.as_raw_fd()))
        .collect();
    Ok((layers, paths.join(":")))
}

/// Turns `path`, with all mounts below, into a shared mount: later mounts propagate between it and its copies that stay
/// shared.
pub fn make_shared(path: &Path) -> io::Result<()> {
    let tree = MountTree::copy(path, true)?;
    tree.set_propagation(Propagation::Shared)?;
    tree.attach(path)
}

/// Attaches `root` at `mount_point`, makes it the root directory of this process and of its mount namespace, and unmounts all
/// other mounts.
///
/// The kernel refuses if the current root is the rootfs; see [`lock_root`].
pub fn pivot_root(root: &MountTree, mount_point: &Path) -> io::Result<()> {
    root.attach(mount_point)?;
    rustix::process::chdir(mount_point)?;
    // pivot_root stacks the old root on the new one; unmount it there.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Whether the root directory is the rootfs of the mount namespace. On diskless nodes the initramfs may stay the root;
/// `pivot_root` cannot replace it.
pub fn root_is_rootfs() -> io::Result<bool> {
    let root = crate::mountinfo::mount_id(std::fs::File::open("/")?)?;
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    Ok(crate::mountinfo::parent_id(&mounts, root) == Some(root))
}

/// Mounts a recursive copy of the root directory on top of it, and moves this process, which must have a single thread, onto the
/// copy and into child user and mount namespaces.
///
/// `pivot_root` can replace the copy. In the new namespaces its mount is locked, because a more privileged namespace created it,
/// and `pivot_root` passes the lock on to each root that replaces it. So a process with all capabilities there can unmount
/// neither of them, and never reaches the rootfs below. A root that is merely moved over the rootfs is not locked.
pub fn lock_root() -> io::Result<()> {
    let copy = MountTree::copy(Path::new("/"), true)?;
    copy.attach(Path::new("/"))?;
    // By path the process would get the directory below the copy.
    rustix::process::fchdir(&copy.0)?;
    rustix::process::chroot(".")?;
    crate::namespace::enter_nested(rustix::thread::UnshareFlags::NEWNS)
}

/// Makes the file system of the root directory read-only; the mounts below it do not change.
pub fn set_root_read_only() -> io::Result<()> {
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
    crate::syscall::check(done)
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::mount_target::TargetKind;

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
            let memory = MountTree::new("tmpfs", &[], MountAttrFlags::empty()).unwrap();
            let at = |path: &str, kind| {
                crate::mount_target::open_or_create(&root, Path::new(path), kind).unwrap()
            };
            memory
                .attach_to(at("/var/run", TargetKind::Directory))
                .unwrap();
            std::fs::write(root.join("run/file"), "of the tree").unwrap();
            let file = MountTree::copy(&root.join("run/file"), false).unwrap();
            file.attach_to(at("/resolv.conf", TargetKind::File))
                .unwrap();
            let content = std::fs::read_to_string(root.join("resolv.conf")).unwrap();
            for target in ["none/there", "run"] {
                rustix::mount::unmount(root.join(target), UnmountFlags::DETACH).unwrap();
            }
            content == "of the tree" && !root.join("run/file").exists()
        });
        assert!(done);
    }

    /// Tries every way in which a container with all capabilities might remove its root to reach the mounts below.
    #[test]
    fn locked_root_and_its_successors_cannot_be_unmounted() {
        let stayed = crate::testing::in_a_child(|| {
            let mount_point = tempfile::tempdir().unwrap();
            crate::namespace::enter_as_root(UnshareFlags::NEWNS).unwrap();
            lock_root().unwrap();
            crate::mount::make_all_private().unwrap();
            assert!(!root_is_rootfs().unwrap());
            let busy = || rustix::mount::unmount("/", UnmountFlags::DETACH).unwrap_err();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            let options = [("mode", "755")];
            let next = MountTree::new("tmpfs", &options, MountAttrFlags::empty()).unwrap();
            pivot_root(&next, mount_point.path()).unwrap();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            std::fs::create_dir("/away").unwrap();
            let moved = rustix::mount::mount_move("/", "/away");
            assert_eq!(moved, Err(rustix::io::Errno::INVAL));
            // A later root is locked too.
            let last = MountTree::new("tmpfs", &options, MountAttrFlags::empty()).unwrap();
            pivot_root(&last, Path::new("/away")).unwrap();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            std::fs::read_dir("/").unwrap().count() == 0
        });
        assert!(stayed);
    }
}
