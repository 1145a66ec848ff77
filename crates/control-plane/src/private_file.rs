//! Files and directories that only the user may access.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Creates a directory of mode 0700 with its parents, unless it exists.
pub fn create_private_dir(path: &Path) -> io::Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|error| with_path(path, &error))
}

/// Creates a file of mode 0600.
pub fn write_private(path: &Path, content: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let created = options.write(true).create_new(true).mode(0o600).open(path);
    let written = created.and_then(|mut file| {
        file.write_all(content.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| with_path(path, &error))
}

/// Opens a directory. Fails if another user may access it.
pub fn open_private_dir(path: &Path) -> io::Result<File> {
    let dir = File::open(path).map_err(|error| with_path(path, &error))?;
    check_private(path, &dir.metadata()?, 0o700)?;
    Ok(dir)
}

/// Opens a file for reading and writing, and creates it if it is missing. Fails if another user may access it.
pub fn open_private_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let opened = options.mode(0o600).open(path);
    let file = opened.map_err(|error| with_path(path, &error))?;
    check_private(path, &file.metadata()?, 0o600)?;
    Ok(file)
}

/// Reads a file. Fails if another user may access it.
pub fn read_private(path: &Path) -> io::Result<String> {
    let file = File::open(path).map_err(|error| with_path(path, &error))?;
    check_private(path, &file.metadata()?, 0o600)?;
    io::read_to_string(file).map_err(|error| with_path(path, &error))
}

fn check_private(path: &Path, metadata: &Metadata, wanted: u32) -> io::Result<()> {
    let (mode, owner) = (metadata.mode() & 0o777, metadata.uid());
    let problem = if owner != rustix::process::geteuid().as_raw() {
        format!("belongs to user {owner}")
    } else if mode & 0o077 != 0 {
        format!("has mode {mode:04o} instead of {wanted:04o}")
    } else {
        return Ok(());
    };
    let text = format!("{} {problem}", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
