//! Files that change all at once.
//!
//! ```text
//!   name      → ..data/name                       what containers open
//!   ..data    → ..2026_11_15_08_30_00.193716      swapped by one rename
//!   ..2026_11_15_08_30_00.193716/name             the bytes
//! ```
//!
//! Programs that watch `..data` rely on this layout; it is upstream's. One writer at a time: a pod's volumes have one owner.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use k8s_openapi::jiff::Timestamp;

use super::{VolumeError, failed, tree};
use crate::content::{FileContent, Payload, check_path, clean};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// Makes the files of `payload` the content of `dir`; `own` sets the ownership of all of `dir` before anybody sees them.
pub(super) fn write(
    dir: &Path,
    payload: &Payload,
    own: impl FnOnce(&Path) -> Result<(), VolumeError>,
) -> Result<(), VolumeError> {
    let files = checked(payload)?;
    let data = dir.join(DATA);
    let old = match fs::read_link(&data) {
        Ok(old) => Some(dir.join(old)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(failed("read", &data)(error)),
    };
    let gone = match &old {
        Some(old) => top_level(old)?
            .into_iter()
            .filter(|name| !files.keys().any(|path| first_part(path) == name))
            .collect(),
        None => BTreeSet::new(),
    };
    let changed = match &old {
        Some(old) => !holds_exactly(old, &files)?,
        None => true,
    };

    for point in &payload.mount_points {
        check_path(point)?;
        let point = dir.join(point);
        fs::create_dir_all(&point).map_err(failed("make", &point))?;
    }
    if changed {
        let new = new_version(dir, &files)?;
        let swapped = own(dir).and_then(|()| swap(dir, &new));
        if let Err(error) = swapped {
            // The error at hand is the one worth telling.
            let _ = fs::remove_dir_all(&new);
            return Err(error);
        }
    }
    link_names(dir, &files)?;
    for name in gone {
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

/// Removes every version but the one that is shown: the last one, and those of a writer that was killed half-way.
fn remove_old_versions(dir: &Path) -> Result<(), VolumeError> {
    let shown = fs::read_link(dir.join(DATA)).map_err(failed("read", dir))?;
    for entry in fs::read_dir(dir).map_err(failed("read", dir))? {
        let entry = entry.map_err(failed("read", dir))?;
        let version = entry.file_name().as_encoded_bytes().starts_with(b"..")
            && entry.file_type().is_ok_and(|kind| kind.is_dir());
        if version && entry.file_name() != shown.as_os_str() {
            fs::remove_dir_all(entry.path()).map_err(failed("remove", &entry.path()))?;
        }
    }
    Ok(())
}

fn checked(payload: &Payload) -> Result<BTreeMap<String, &FileContent>, VolumeError> {
    let mut files = BTreeMap::new();
    for (path, file) in &payload.files {
        check_path(path)?;
        files.insert(clean(path), file);
    }
    Ok(files)
}

fn first_part(path: &str) -> &str {
    path.split_once('/').map_or(path, |(first, _)| first)
}

/// Writes all files into a directory of their own, of which nobody knows yet.
fn new_version(dir: &Path, files: &BTreeMap<String, &FileContent>) -> Result<PathBuf, VolumeError> {
    let version = loop {
        let now = Timestamp::now().strftime("..%Y_%m_%d_%H_%M_%S");
        let path = dir.join(format!("{now}.{}", random()?));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("make", &path)(error)),
            Ok(()) => break path,
        }
    };
    set_mode(&version, 0o755)?;
    for (path, file) in files {
        let full = version.join(path);
        make_parents(&version, path)?;
        fs::write(&full, &file.data).map_err(failed("write", &full))?;
        // After writing, and whatever the umask is.
        set_mode(&full, file.mode)?;
        own(&full, file.user)?;
    }
    Ok(version)
}

fn make_parents(version: &Path, path: &str) -> Result<(), VolumeError> {
    let mut parent = version.to_owned();
    let Some((parents, _)) = path.rsplit_once('/') else {
        return Ok(());
    };
    for part in parents.split('/') {
        parent.push(part);
        match fs::create_dir(&parent) {
            Ok(()) => set_mode(&parent, 0o755)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("make", &parent)(error)),
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<(), VolumeError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))
}

fn own(path: &Path, user: Option<i64>) -> Result<(), VolumeError> {
    use rustix::fs::{CWD, Mode, OFlags};

    if user.is_none() {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| tree::chown(file.as_fd(), user, None))
        .map_err(failed("set the owner of", path))
}

/// The one moment at which everything changes.
fn swap(dir: &Path, new: &Path) -> Result<(), VolumeError> {
    let link = dir.join(NEW_DATA);
    // Somebody died between the two calls below.
    let _ = fs::remove_file(&link);
    let name = new.file_name().unwrap_or_default();
    std::os::unix::fs::symlink(name, &link).map_err(failed("make", &link))?;
    fs::rename(&link, dir.join(DATA)).map_err(failed("swap", &link))
}

/// The names that containers see, each a link into `..data`.
fn link_names(dir: &Path, files: &BTreeMap<String, &FileContent>) -> Result<(), VolumeError> {
    for (path, file) in files {
        let name = first_part(path);
        let link = dir.join(name);
        match std::os::unix::fs::symlink(Path::new(DATA).join(name), &link) {
            Ok(()) => own(&link, file.user)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("make", &link)(error)),
        }
    }
    Ok(())
}

/// What a version holds at its top.
fn top_level(version: &Path) -> Result<BTreeSet<String>, VolumeError> {
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

/// Whether a version has these files with this content, and no other.
fn holds_exactly(
    version: &Path,
    files: &BTreeMap<String, &FileContent>,
) -> Result<bool, VolumeError> {
    if !version.is_dir() {
        return Ok(false);
    }
    for (path, file) in files {
        match fs::read(version.join(path)) {
            Ok(data) if data == file.data => {}
            // A file where a directory was, or the other way round, is a change like any other.
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
