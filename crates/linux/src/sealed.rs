//! Runs this program from a sealed copy that cannot be modified.
//!
//! Until it calls exec, a process of a container has our program as its `/proc/PID/exe`, and that file belongs to the user:
//! container root could change its mode, its owner or possibly its content (compare CVE-2019-5736). So the program runs from a
//! sealed memfd. Processes started as `/proc/self/exe` run from the same memfd, so a node has one copy, which is freed with the
//! last of these processes.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::file_id::FileId;

const OWN_EXE: &str = "/proc/self/exe";
const SEALS: SealFlags = SealFlags::SEAL
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE);
/// F_SEAL_EXEC of Linux 6.3 also prevents changes of the executable bits.
const SEAL_EXEC: SealFlags = SealFlags::from_bits_retain(0x20);
/// The user may read and execute it; other ids of their containers may not.
const MODE: u32 = 0o500;

/// The identity of the executable of this process.
pub fn own_executable() -> io::Result<FileId> {
    Ok(FileId::from(&std::fs::metadata(OWN_EXE)?))
}

/// Whether this process runs from a sealed copy.
pub fn is_sealed() -> io::Result<bool> {
    let own = File::open(OWN_EXE)?;
    // fcntl fails for files that do not support seals.
    Ok(rustix::fs::fcntl_get_seals(&own).is_ok_and(|seals| seals.contains(SEALS)))
}

/// Executes this program again, with the same arguments and environment, from a sealed memfd called `name`. Returns only on
/// failure, without side effects.
pub fn reexec_from_copy(name: &str) -> io::Error {
    let copy = match copy(name) {
        Ok(copy) => copy,
        Err(error) => return error,
    };
    let mut arguments = std::env::args_os();
    let first = arguments.next().unwrap_or_default();
    // The descriptor is close-on-exec.
    Command::new(format!("/proc/self/fd/{}", copy.as_raw_fd()))
        .arg0(first)
        .args(arguments)
        .exec()
}

fn copy(name: &str) -> io::Result<File> {
    let own = File::open(OWN_EXE)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // MFD_EXEC is needed where memfds are not executable by default; kernels before 6.3 reject the flag.
    let copy = rustix::fs::memfd_create(name, flags | MemfdFlags::EXEC)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    let mut copy = File::from(copy);
    let length = crate::elf::loaded_length(&own)?.unwrap_or(u64::MAX);
    io::copy(&mut io::Read::take(&own, length), &mut copy)?;
    copy.set_permissions(Permissions::from_mode(MODE))?;
    rustix::fs::fcntl_add_seals(&copy, SEALS | SEAL_EXEC)
        .or_else(|_| rustix::fs::fcntl_add_seals(&copy, SEALS))?;
    // A file that is open for writing cannot be executed.
    File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Write};
    use std::process::Stdio;

    /// Set for the child process below, which runs from a copy of itself.
    const COPIED: &str = "CORACLE_TEST_COPIED";

    #[test]
    fn sealed_copy_behaves_like_the_original() {
        if std::env::var_os(COPIED).is_some() {
            if !is_sealed().unwrap() {
                panic!("{}", reexec_from_copy("test"));
            }
            assert_unchangeable();
            eprint!("sealed");
            return;
        }
        assert!(!is_sealed().unwrap());
        let before = own_executable().unwrap();
        assert_eq!(before, own_executable().unwrap());
        let copied = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("sealed::tests::sealed_copy_behaves_like_the_original")
            .env(COPIED, "1")
            .stdout(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&copied.stderr);
        assert!(
            copied.status.success() && stderr.contains("sealed"),
            "{stderr}"
        );
    }

    /// Runs as the owner of the copy, who has more permissions than any container process.
    fn assert_unchangeable() {
        let change = File::options().write(true).open(OWN_EXE);
        let written = change.and_then(|mut file| file.write_all(b"x"));
        let refused = written.unwrap_err().kind();
        let wanted = [ErrorKind::PermissionDenied, ErrorKind::ExecutableFileBusy];
        assert!(wanted.contains(&refused), "{refused:?}");
        let own = std::fs::metadata(OWN_EXE).unwrap();
        assert_eq!(own.permissions().mode() & 0o777, MODE);
        let original = std::env::args().next().unwrap();
        assert!(own.len() <= std::fs::metadata(original).unwrap().len());
    }
}
