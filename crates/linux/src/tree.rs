//! Mounts that are made first and put in their place later.
//!
//! A container's mounts come from the outside and end inside. Each is opened while the outside can still be seen, as a
//! *detached* tree that nobody finds by a path; then the process moves into the container's root, and puts the trees
//! in place there, where no symbolic link of an image leads out.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

/// A tree of mounts that isn't in any place yet.
#[derive(Debug)]
pub struct Tree(OwnedFd);

/// How later mounts travel between a tree and the one it was taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// Not at all.
    Private,
    /// From the outside in.
    Slave,
    /// Both ways.
    Shared,
}

impl AsFd for Tree {
    /// Its top, as `O_PATH`; also after it was put in its place.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Tree {
    /// What is at `path`, with all that is mounted below if `recursive`.
    pub fn copy(path: &Path, recursive: bool) -> io::Result<Self> {
        Ok(Self(rustix::mount::open_tree(
            CWD,
            path,
            copy_flags(recursive),
        )?))
    }

    /// The same for a file or directory that is open.
    pub fn copy_open(file: impl AsFd, recursive: bool) -> io::Result<Self> {
        let flags = copy_flags(recursive) | OpenTreeFlags::AT_EMPTY_PATH;
        Ok(Self(rustix::mount::open_tree(file.as_fd(), "", flags)?))
    }

    /// A new file system of a kind such as `tmpfs`, with options such as `("mode", "755")`.
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

    /// `lower` directories, the lowest first, stacked below `upper`, whose changes take place there. `work` must be an empty
    /// directory of the same file system as `upper`.
    pub fn overlay(lower: &[impl AsRef<Path>], upper: &Path, work: &Path) -> io::Result<Self> {
        let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |name: &str, value: &Path| {
            rustix::mount::fsconfig_set_string(context.as_fd(), name, value)
        };
        rustix::mount::fsconfig_set_flag(context.as_fd(), "userxattr")?;
        // One by one where the kernel can (6.5), as the whole list may not exceed 255 bytes there. Older ones take any word and refuse
        // at the end.
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

    /// `lower` directories, the lowest first, stacked to be read.
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
            // As below; of these short names fourteen fit.
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

    /// Only to be read from now on, with all that is mounted below if `recursive`.
    pub fn read_only(&self, recursive: bool) -> io::Result<()> {
        set_attributes(&self.0, libc::MOUNT_ATTR_RDONLY, recursive)
    }

    /// Its device files are without effect.
    pub fn without_devices(&self) -> io::Result<()> {
        set_attributes(&self.0, libc::MOUNT_ATTR_NODEV, false)
    }

    /// Puts the tree on `place`.
    pub fn put(&self, place: &Path) -> io::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(self.0.as_fd(), "", CWD, place, flags)?;
        Ok(())
    }

    /// Puts the tree on what is open.
    pub fn put_on(&self, place: impl AsFd) -> io::Result<()> {
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(self.0.as_fd(), "", place.as_fd(), "", flags)?;
        Ok(())
    }

    /// Opens its top, a directory, to be read.
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

    /// Makes later mounts travel as said.
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

/// For kernels before 6.5: one mount call, whose options must fit in a page, with the layers as open descriptors because
/// their names are long.
fn legacy_overlay(lower: &[impl AsRef<Path>], upper: &Path, work: &Path) -> io::Result<Tree> {
    let (_open, names) = short_names(lower)?;
    let options = format!(
        "userxattr,lowerdir={names},upperdir={},workdir={}",
        upper.display(),
        work.display()
    );
    let options = std::ffi::CString::new(options)?;
    // It needs a place for a moment: the work directory's own parent is ours alone.
    let place = work.with_file_name("merged");
    std::fs::create_dir_all(&place)?;
    let flags = rustix::mount::MountFlags::NODEV;
    rustix::mount::mount("overlay", &place, "overlay", flags, options.as_c_str())?;
    let tree = Tree::copy(&place, false);
    rustix::mount::unmount(&place, UnmountFlags::DETACH)?;
    tree
}

/// Layers as open descriptors, and the list of their names, the highest first.
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

/// Makes what is at `path`, with all that is mounted below, a mount of its own whose later mounts travel to all copies that
/// are taken of it, and from those that stay shared.
pub fn share(path: &Path) -> io::Result<()> {
    let tree = Tree::copy(path, true)?;
    tree.propagate(Propagation::Shared)?;
    tree.put(path)
}

/// Makes `root` the root directory of this process and of its mount namespace, and lets go of all other mounts.
///
/// The kernel refuses where the root directory is its first file system; see [`lock_root`].
pub fn enter_root(root: &Tree, place: &Path) -> io::Result<()> {
    root.put(place)?;
    rustix::process::chdir(place)?;
    // The old root is put on top of the new one, and taken away from there.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Whether the root directory is the root of its mount namespace: on nodes without disks the kernel's first file system, an
/// initramfs, may stay the root. `pivot_root` can't replace it.
pub fn root_is_first() -> io::Result<bool> {
    let root = crate::mounted::id(std::fs::File::open("/")?)?;
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    Ok(crate::mounted::parent(&mounts, root) == Some(root))
}

/// Puts a copy of the root directory, with all that is mounted below, on top of it, and moves this process, which must have
/// a single thread, onto the copy and into a user and a mount namespace below the current ones.
///
/// The copy can be replaced by `pivot_root`. In the new namespaces its mount is locked, because it was made in more privileged
/// ones; `pivot_root` hands the lock on to each root that replaces it. So a process that has all capabilities there can
/// unmount neither of them, and never sees what is below. A root that is merely moved over the first one isn't locked.
pub fn lock_root() -> io::Result<()> {
    let copy = Tree::copy(Path::new("/"), true)?;
    copy.put(Path::new("/"))?;
    // By its path one would get what is below.
    rustix::process::fchdir(&copy.0)?;
    rustix::process::chroot(".")?;
    crate::namespace::enter_below(rustix::thread::UnshareFlags::NEWNS)
}

/// Makes the root directory's own file system one that can only be read; what is mounted below is not concerned.
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
    fn a_place_that_is_a_link_is_where_the_link_leads() {
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

    /// What a container with all capabilities might try on its root, to get at what is below.
    #[test]
    fn a_locked_root_and_its_successors_stay() {
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
            // Another root may follow, and is locked too.
            let last = Tree::new("tmpfs", &options, MountAttrFlags::empty()).unwrap();
            enter_root(&last, Path::new("/away")).unwrap();
            assert_eq!(busy(), rustix::io::Errno::INVAL);
            std::fs::read_dir("/").unwrap().count() == 0
        });
        assert!(stayed);
    }
}
