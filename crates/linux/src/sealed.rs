//! Running from a copy of our program that nobody can change.
//!
//! A process that becomes a container's program has our program as its `/proc/PID/exe` until then, and the file behind that
//! link belongs to the user: container root could change its mode, its owner or, one day, its content. So the program runs
//! from a sealed memfd. What is started as `/proc/self/exe` runs from the same one, so that a node has one copy, which is
//! gone with the last of these processes.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::file_id::FileId;

const OWN: &str = "/proc/self/exe";
const SEALS: SealFlags = SealFlags::SEAL
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE);
/// F_SEAL_EXEC of Linux 6.3: who may execute it can't be changed either.
const SEAL_EXEC: SealFlags = SealFlags::from_bits_retain(0x20);
/// The user reads and executes it; other ids of their containers do neither.
const MODE: u32 = 0o500;

/// The file that this process runs from.
pub fn own_program() -> io::Result<FileId> {
    Ok(FileId::from(&std::fs::metadata(OWN)?))
}

/// Whether this process runs from a sealed copy.
pub fn is_sealed() -> io::Result<bool> {
    let own = File::open(OWN)?;
    // Files that can't be sealed say so by an error.
    Ok(rustix::fs::fcntl_get_seals(&own).is_ok_and(|seals| seals.contains(SEALS)))
}

/// Begins this program anew, with the same arguments and environment, from a sealed copy of its file that is called `name`.
/// Returns only if that fails; nothing has happened then.
pub fn run_from_copy(name: &str) -> io::Error {
    let copy = match copy(name) {
        Ok(copy) => copy,
        Err(error) => return error,
    };
    let mut arguments = std::env::args_os();
    let first = arguments.next().unwrap_or_default();
    // The descriptor closes when the program has begun.
    Command::new(format!("/proc/self/fd/{}", copy.as_raw_fd()))
        .arg0(first)
        .args(arguments)
        .exec()
}

fn copy(name: &str) -> io::Result<File> {
    let own = File::open(OWN)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Where memfds are not executable unless they say so; kernels before 6.3 don't know the word.
    let copy = rustix::fs::memfd_create(name, flags | MemfdFlags::EXEC)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    let mut copy = File::from(copy);
    let length = crate::elf::loaded_length(&own)?.unwrap_or(u64::MAX);
    io::copy(&mut io::Read::take(&own, length), &mut copy)?;
    copy.set_permissions(Permissions::from_mode(MODE))?;
    rustix::fs::fcntl_add_seals(&copy, SEALS | SEAL_EXEC)
        .or_else(|_| rustix::fs::fcntl_add_seals(&copy, SEALS))?;
    // What is open for writing can't be executed.
    File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Write};
    use std::process::Stdio;

    /// For the process below: it is to run from a copy of itself.
    const COPIED: &str = "CORACLE_TEST_COPIED";

    #[test]
    fn a_copy_is_sealed_and_behaves_like_the_original() {
        if std::env::var_os(COPIED).is_some() {
            if !is_sealed().unwrap() {
                panic!("{}", run_from_copy("test"));
            }
            try_to_change();
            eprint!("sealed");
            return;
        }
        assert!(!is_sealed().unwrap());
        let before = FileId::of_own_program().unwrap();
        assert_eq!(before, FileId::of_own_program().unwrap());
        let copied = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("sealed::tests::a_copy_is_sealed_and_behaves_like_the_original")
            .env(COPIED, "1")
            .stdout(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&copied.stderr);
        assert!(copied.status.success() && said.contains("sealed"), "{said}");
    }

    /// As the owner of the copy, which no container is.
    fn try_to_change() {
        let change = File::options().write(true).open(OWN);
        let written = change.and_then(|mut file| file.write_all(b"x"));
        let refused = written.unwrap_err().kind();
        let wanted = [ErrorKind::PermissionDenied, ErrorKind::ExecutableFileBusy];
        assert!(wanted.contains(&refused), "{refused:?}");
        let own = std::fs::metadata(OWN).unwrap();
        assert_eq!(own.permissions().mode() & 0o777, MODE);
        let original = std::env::args().next().unwrap();
        assert!(own.len() <= std::fs::metadata(original).unwrap().len());
    }
}
