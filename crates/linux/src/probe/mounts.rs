//! Probes for mounts that need more than a user namespace: overlayfs and FUSE.

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;
use rustix::thread::UnshareFlags;

use super::{ProbeReport, failed, userns};
use crate::mount;

/// Mounts an empty tmpfs over a directory that exists on every machine; only this process sees it.
pub(super) fn scratch_tmpfs() -> Result<PathBuf, String> {
    let dir = ["/tmp", "/dev/shm", "/mnt"]
        .iter()
        .map(Path::new)
        .find(|dir| dir.is_dir());
    let dir = dir.ok_or("none of /tmp, /dev/shm and /mnt exists")?;
    mount::tmpfs(dir, 4 << 20).map_err(failed("mounting a tmpfs"))?;
    Ok(dir.to_owned())
}

/// Mounts an overlay like the root file system of a container. With an argument, the upper layer is in that directory, on the file
/// system that containers will use: some file systems (NFS, Lustre) cannot hold an upper layer.
pub(super) fn overlay(upper_home: Option<&str>) -> ProbeReport {
    userns::enter(UnshareFlags::empty())?;
    let upper_home = upper_home.map(PathBuf::from);
    // The tmpfs may cover the directory of the upper layer, so enter that directory first and use a relative path.
    if let Some(dir) = &upper_home {
        std::env::set_current_dir(dir).map_err(failed("entering the scratch directory"))?;
    }
    let home = scratch_tmpfs()?;
    if upper_home.is_none() {
        std::env::set_current_dir(&home).map_err(failed("entering the tmpfs"))?;
    }
    let lower = home.join("lower");
    let merged = home.join("merged");
    for dir in [
        &lower.join("dir"),
        &merged,
        Path::new("upper"),
        Path::new("work"),
    ] {
        std::fs::create_dir_all(dir).map_err(failed("creating directories"))?;
    }
    std::fs::write(lower.join("dir/file"), "lower").map_err(failed("writing"))?;

    let options = format!(
        "lowerdir={},upperdir=upper,workdir=work,userxattr",
        lower.display()
    );
    let options = CString::new(options).map_err(failed("options"))?;
    rustix::mount::mount(
        "overlay",
        &merged,
        "overlay",
        MountFlags::empty(),
        options.as_c_str(),
    )
    .map_err(failed("mounting"))?;
    try_changes(&merged)?;
    Ok("mounted with userxattr; deletions and replaced directories work".to_owned())
}

/// Makes the changes that image layers make to lower layers: change a file, delete it, and replace a directory (which needs
/// extended attributes).
fn try_changes(merged: &Path) -> Result<(), String> {
    let dir = merged.join("dir");
    std::fs::write(dir.join("file"), "upper")
        .map_err(failed("changing a file of the lower layer"))?;
    std::fs::remove_file(dir.join("file")).map_err(failed("deleting a file of the lower layer"))?;
    std::fs::remove_dir(&dir).map_err(failed("deleting a directory of the lower layer"))?;
    std::fs::create_dir(&dir).map_err(failed("replacing a directory of the lower layer"))?;
    let mut entries = std::fs::read_dir(&dir).map_err(failed("reading the replaced directory"))?;
    if entries.next().is_some() {
        return Err("a replaced directory still shows the old files".to_owned());
    }
    Ok(())
}

/// Opens `/dev/fuse` and mounts a file system on it that has no server.
pub(super) fn fuse(_: Option<&str>) -> ProbeReport {
    userns::enter(UnshareFlags::empty())?;
    // Open the device inside the user namespace: the kernel mounts only for the namespace that opened it.
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .map_err(failed("/dev/fuse"))?;
    let dir = scratch_tmpfs()?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0",
        device.as_raw_fd()
    );
    let options = CString::new(options).map_err(failed("options"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("probe", &dir, "fuse", flags, options.as_c_str())
        .map_err(failed("mounting"))?;
    Ok("/dev/fuse opens and mounts".to_owned())
}
