//! Directories on the shared file system, which nobody can guess.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::ProvisionError;

/// How much a file system holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// In all, in bytes.
    pub total: u64,
    /// What this user may still write, in bytes.
    pub available: u64,
}

/// The room on the file system of `dir`, which is made if it is missing.
pub(super) fn room(dir: &Path) -> Result<Room, ProvisionError> {
    let failed = |action: &'static str| {
        move |source: io::Error| ProvisionError::Io {
            action,
            path: dir.to_owned(),
            source,
        }
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(failed("make"))?;
    let status = std::fs::metadata(dir).map_err(failed("look at"))?;
    // Below it anybody may write, so that containers of all users can; nobody else may get there.
    if status.uid() != rustix::process::geteuid().as_raw() {
        return Err(ProvisionError::Refused(format!(
            "{} belongs to another user",
            dir.display()
        )));
    }
    if status.mode() & 0o077 != 0 {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
            .map_err(failed("close to others"))?;
    }
    let space = rustix::fs::statvfs(dir)
        .map_err(io::Error::from)
        .map_err(failed("look at"))?;
    Ok(Room {
        total: space.f_blocks.saturating_mul(space.f_frsize),
        available: space.f_bavail.saturating_mul(space.f_frsize),
    })
}

/// Makes a new directory in `dir`, open to containers of every user.
pub(super) fn make(dir: &Path) -> Result<PathBuf, ProvisionError> {
    let path = dir.join(random_name()?);
    let failed = |source| ProvisionError::Io {
        action: "make",
        path: path.clone(),
        source,
    };
    std::fs::create_dir(&path).map_err(failed)?;
    // Whatever the umask is.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).map_err(failed)?;
    Ok(path)
}

/// 128 random bits.
pub(super) fn random_name() -> Result<String, ProvisionError> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(
        |error| ProvisionError::Io {
            action: "read",
            path: PathBuf::from("/dev/urandom"),
            source: error.into(),
        },
    )?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_open_below_a_closed_door() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("coracle/volumes");
        let before = room(&dir).unwrap();
        assert!(before.total >= before.available && before.available > 0);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        room(&dir).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(&dir), 0o700);
        let (one, other) = (make(&dir).unwrap(), make(&dir).unwrap());
        assert_ne!(one, other);
        assert_eq!(mode(&one), 0o777);
        assert_eq!(one.file_name().unwrap().len(), 32);
    }
}
