//! Directories on the shared file system, with unguessable names.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::ProvisionError;

/// Size and free space of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskSpace {
    /// The size in bytes.
    pub total: u64,
    /// The bytes that this user may still write.
    pub available: u64,
}

/// The space on the file system of `dir`. Creates `dir`, and closes it to other users.
pub(super) fn disk_space(dir: &Path) -> Result<DiskSpace, ProvisionError> {
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
        .map_err(failed("create"))?;
    let status = std::fs::metadata(dir).map_err(failed("stat"))?;
    // The directories below are world-writable for containers of all ids, so other users must not reach them.
    if status.uid() != rustix::process::geteuid().as_raw() {
        return Err(ProvisionError::Rejected(format!(
            "{} belongs to another user",
            dir.display()
        )));
    }
    if status.mode() & 0o077 != 0 {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
            .map_err(failed("set the mode of"))?;
    }
    let space = rustix::fs::statvfs(dir)
        .map_err(io::Error::from)
        .map_err(failed("stat"))?;
    Ok(DiskSpace {
        total: space.f_blocks.saturating_mul(space.f_frsize),
        available: space.f_bavail.saturating_mul(space.f_frsize),
    })
}

/// Creates a directory in `dir`, writable for containers of all ids.
pub(super) fn create(dir: &Path) -> Result<PathBuf, ProvisionError> {
    let path = dir.join(random_name()?);
    let failed = |source| ProvisionError::Io {
        action: "create",
        path: path.clone(),
        source,
    };
    std::fs::create_dir(&path).map_err(failed)?;
    // Regardless of the umask.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).map_err(failed)?;
    Ok(path)
}

/// A name of 128 random bits.
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
    fn volumes_are_writable_in_a_private_directory() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("coracle/volumes");
        let before = disk_space(&dir).unwrap();
        assert!(before.total >= before.available && before.available > 0);
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        disk_space(&dir).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(&dir), 0o700);
        let (one, other) = (create(&dir).unwrap(), create(&dir).unwrap());
        assert_ne!(one, other);
        assert_eq!(mode(&one), 0o777);
        assert_eq!(one.file_name().unwrap().len(), 32);
    }
}
