//! Keeps containers from executing our own program (compare CVE-2019-5736).
//!
//! Until a process executes its program, its `/proc/self/exe` is our file. A container that names that path as its program, or as
//! the program's interpreter, would execute our file as a process that the container controls.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use linux::file_id::FileId;
use rustix::fs::{Mode, OFlags};

use super::error::InnerError;

/// The kernel reads this much of a script's first line.
const FIRST_LINE_SIZE: usize = 256;
/// Maximum depth of nested interpreters.
const MAX_INTERPRETERS: usize = 6;

/// The file that this process runs from.
#[derive(Clone, Copy, Debug)]
pub struct SelfExe(FileId);

impl SelfExe {
    /// Must be called while `/proc` is the host's.
    pub fn find() -> io::Result<Self> {
        linux::sealed::own_executable().map(Self)
    }

    /// Fails if a program is our file or is interpreted by it, in the current root and directory.
    ///
    /// A file that cannot be read passes: a script that its user may execute but not read cannot run our file, unless that user is
    /// root without its usual capabilities.
    pub fn deny(self, program: &Path) -> Result<(), InnerError> {
        let mut next = program.to_owned();
        for _ in 0..MAX_INTERPRETERS {
            let Ok(found) = std::fs::metadata(&next) else {
                break;
            };
            if FileId::from(&found) == self.0 {
                return Err(InnerError::program(format!(
                    "exec: \"{}\": containers cannot run the program that starts them",
                    program.display()
                )));
            }
            match interpreter(&next) {
                Ok(Some(interpreter)) if found.is_file() => next = interpreter,
                _ => break,
            }
        }
        Ok(())
    }
}

/// The interpreter of a script (`#!`) or of an ELF file (its dynamic linker).
fn interpreter(program: &Path) -> io::Result<Option<PathBuf>> {
    // Opening a pipe must not block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(program, flags, Mode::empty())?);
    let mut line = [0; FIRST_LINE_SIZE];
    let read = file.read_at(&mut line, 0)?;
    let name = match script_interpreter(&line[..read]) {
        Some(name) => Some(name.to_owned()),
        None => linux::elf::interpreter(&file)?,
    };
    Ok(name.map(|name| PathBuf::from(OsStr::from_bytes(&name))))
}

/// Parses as the kernel does: the first word after `#!`.
fn script_interpreter(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"#!")?;
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = rest.iter().position(|byte| !is_space(byte))?;
    let rest = &rest[start..];
    let end = rest
        .iter()
        .position(|byte| is_space(byte) || matches!(byte, b'\n' | 0));
    Some(&rest[..end.unwrap_or(rest.len())])
}

#[cfg(test)]
mod tests {
    use super::super::error::InnerErrorKind;
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn interpreter_is_first_word_of_script() {
        assert_eq!(script_interpreter(b"#!/bin/sh\n"), Some(&b"/bin/sh"[..]));
        assert_eq!(script_interpreter(b"#! \t/a -b c"), Some(&b"/a"[..]));
        assert_eq!(script_interpreter(b"#!/cut"), Some(&b"/cut"[..]));
        assert_eq!(script_interpreter(b"#! "), None);
        assert_eq!(script_interpreter(b"echo"), None);
    }

    #[test]
    fn own_program_is_denied_under_any_name() {
        let self_exe = SelfExe::find().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let script = |name: &str, interpreter: &Path| {
            std::fs::write(at(name), format!("#!{} -x\n", interpreter.display())).unwrap();
        };
        symlink("/proc/self/exe", at("link")).unwrap();
        script("script", Path::new("/proc/self/exe"));
        script("through-link", &at("link"));
        script("second", &at("script"));
        std::fs::hard_link(std::env::current_exe().unwrap(), at("hard")).unwrap();
        for name in ["link", "script", "through-link", "second", "hard"] {
            let denied = self_exe.deny(&at(name)).unwrap_err();
            assert_eq!(denied.kind, InnerErrorKind::Program);
            assert!(denied.message.contains(name), "{name}");
        }

        // An ELF file that names our program as its dynamic linker.
        let shell = std::fs::read("/bin/sh").unwrap();
        let linker = linux::elf::interpreter(&File::open("/bin/sh").unwrap());
        let linker = linker.unwrap().unwrap();
        let offset = shell.windows(linker.len()).position(|part| part == linker);
        let mut other = shell.clone();
        let name = b"/proc/self/exe\0";
        other[offset.unwrap()..][..name.len()].copy_from_slice(name);
        std::fs::write(at("linked"), other).unwrap();
        assert!(self_exe.deny(&at("linked")).is_err());

        script("plain", Path::new("/bin/sh"));
        script("round", &at("round"));
        std::fs::create_dir(at("dir")).unwrap();
        for name in ["plain", "round", "dir", "none"] {
            assert!(self_exe.deny(&at(name)).is_ok(), "{name}");
        }
        assert!(self_exe.deny(Path::new("/bin/sh")).is_ok());
    }
}
