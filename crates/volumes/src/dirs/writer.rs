//! Atomic updates of a volume's files.
//!
//! ```text
//!   name      → ..data/name                       opened by containers
//!   ..data    → ..2026_11_15_08_30_00.193716      replaced by one rename
//!   ..2026_11_15_08_30_00.193716/name             the content
//! ```
//!
//! This is the layout of upstream's AtomicWriter. Programs that watch `..data` rely on it. Only the pod's sandbox writes to a
//! volume.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use k8s_openapi::jiff::Timestamp;

use super::{VolumeError, failed, opath};
use crate::content::{FileContent, Payload, check_path, clean};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// Replaces the content of `dir` by the files of `payload`. Calls `set_ownership` before the files
/// become visible.
pub(super) fn write(
    dir: &Path,
    payload: &Payload,
    set_ownership: impl FnOnce(&Path) -> Result<(), VolumeError>,
) -> Result<(), VolumeError> {
    let files = checked_files(payload)?;
    let data = dir.join(DATA);
    let old = match fs::read_link(&data) {
        Ok(old) => Some(dir.join(old)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed("read", &data)(error)),
    };
    let removed = match &old {
        Some(old) => top_level_names(old)?
            .into_iter()
            .filter(|name| !files.keys().any(|path| first_component(path) == name))
            .collect(),
        None => BTreeSet::new(),
    };
    let changed = match &old {
        Some(old) => !contains_exactly(old, &files)?,
        None => true,
    };

    for point in &payload.mount_points {
        check_path(point)?;
        let point = dir.join(point);
        fs::create_dir_all(&point).map_err(failed("create", &point))?;
    }
    if changed {
        let new = new_version(dir, &files)?;
        let swapped = set_ownership(dir).and_then(|()| swap(dir, &new));
        if let Err(error) = swapped {
            // Report the original error, not one of the cleanup.
            let _ = fs::remove_dir_all(&new);
            return Err(error);
        }
    }
    link_names(dir, &files)?;
    for name in removed {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &path)(error));
            }
            _ => {}
        }
    }
    remove_old_versions(dir)
}

/// Removes all versions except the current one: the previous one, and leftovers of a killed writer.
fn remove_old_versions(dir: &Path) -> Result<(), VolumeError> {
    let current = fs::read_link(dir.join(DATA)).map_err(failed("read", dir))?;
    for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
        let entry = entry.map_err(failed("read", dir))?;
        let is_version = entry.file_name().as_encoded_bytes().starts_with(b"..")
            && entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_version && entry.file_name() != current.as_os_str() {
            fs::remove_dir_all(entry.path()).map_err(failed("remove", &entry.path()))?;
        }
    }
    Ok(())
}

fn checked_files(payload: &Payload) -> Result<BTreeMap<String, &FileContent>, VolumeError> {
    let mut files = BTreeMap::new();
    for (path, file) in &payload.files {
        check_path(path)?;
        files.insert(clean(path), file);
    }
    Ok(files)
}

fn first_component(path: &str) -> &str {
    path.split_once('/').map_or(path, |(first, _)| first)
}

/// Writes all files into a new version directory, which no symlink refers to yet.
fn new_version(dir: &Path, files: &BTreeMap<String, &FileContent>) -> Result<PathBuf, VolumeError> {
    let version = loop {
        let now = Timestamp::now().strftime("..%Y_%m_%d_%H_%M_%S");
        let path = dir.join(format!("{now}.{}", random()?));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("create", &path)(error)),
            Ok(()) => break path,
        }
    };
    set_mode(&version, 0o755)?;
    for (path, file) in files {
        let full = version.join(path);
        create_parents(&version, path)?;
        fs::write(&full, &file.data).map_err(failed("write", &full))?;
        // After writing, because the mode may forbid it. Overrides the umask.
        set_mode(&full, file.mode)?;
        set_owner(&full, file.user)?;
    }
    Ok(version)
}

fn create_parents(version: &Path, path: &str) -> Result<(), VolumeError> {
    let mut parent = version.to_owned();
    let Some((parents, _)) = path.rsplit_once('/') else {
        return Ok(());
    };
    for part in parents.split('/') {
        parent.push(part);
        match fs::create_dir(&parent) {
            Ok(()) => set_mode(&parent, 0o755)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("create", &parent)(error)),
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<(), VolumeError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))
}

fn set_owner(path: &Path, user: Option<i64>) -> Result<(), VolumeError> {
    use rustix::fs::{CWD, Mode, OFlags};

    if user.is_none() {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| opath::chown(file.as_fd(), user, None))
        .map_err(failed("set the owner of", path))
}

/// Switches `..data` to the new version by one rename.
fn swap(dir: &Path, new: &Path) -> Result<(), VolumeError> {
    let link = dir.join(NEW_DATA);
    // A leftover of a writer that was killed between the two calls below.
    let _ = fs::remove_file(&link);
    let name = new.file_name().unwrap_or_default();
    std::os::unix::fs::symlink(name, &link).map_err(failed("create", &link))?;
    fs::rename(&link, dir.join(DATA)).map_err(failed("rename", &link))
}

/// Creates the visible names: symlinks into `..data`.
fn link_names(dir: &Path, files: &BTreeMap<String, &FileContent>) -> Result<(), VolumeError> {
    for (path, file) in files {
        let name = first_component(path);
        let link = dir.join(name);
        match std::os::unix::fs::symlink(Path::new(DATA).join(name), &link) {
            Ok(()) => set_owner(&link, file.user)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("create", &link)(error)),
        }
    }
    Ok(())
}

/// The top-level names of a version.
fn top_level_names(version: &Path) -> Result<BTreeSet<String>, VolumeError> {
    let entries = match fs::read_dir(version) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(failed("read", version))?,
    };
    let mut names = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(failed("read", version))?;
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

/// Whether a version has exactly these files with this content.
fn contains_exactly(
    version: &Path,
    files: &BTreeMap<String, &FileContent>,
) -> Result<bool, VolumeError> {
    if !version.is_dir() {
        return Ok(false);
    }
    for (path, file) in files {
        match fs::read(version.join(path)) {
            Ok(data) if data == file.data => {}
            // Includes a file that became a directory, and vice versa.
            _ => return Ok(false),
        }
    }
    Ok(count_files(version)? == files.len())
}

fn count_files(dir: &Path) -> Result<usize, VolumeError> {
    let mut count = 0;
    for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
        let entry = entry.map_err(failed("read", dir))?;
        let kind = entry.file_type().map_err(failed("read", dir))?;
        count += if kind.is_dir() {
            count_files(&entry.path())?
        } else {
            1
        };
    }
    Ok(count)
}

fn random() -> Result<u32, VolumeError> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(io::Error::from)
        .map_err(failed("read", Path::new("/dev/urandom")))?;
    Ok(u32::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests;
