//! Keeps containers from running the program that they are started by.
//!
//! Until a process has become its program, its `/proc/self/exe` is ours. Whoever names that as a container's program, or as
//! what interprets it, would have our file in a container, as the program of a process that the container owns.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use linux::file_id::FileId;
use rustix::fs::{Mode, OFlags};

use super::failure::Failure;

/// How much of a script's first line the kernel reads.
const FIRST_LINE: usize = 256;
/// How often a program may be interpreted by another.
const MAX_DEPTH: usize = 6;

/// The file that this process runs from.
#[derive(Clone, Copy, Debug)]
pub struct OwnProgram(FileId);

impl OwnProgram {
    /// To be found while `/proc` is the host's.
    pub fn find() -> io::Result<Self> {
        linux::sealed::own_program().map(Self)
    }

    /// Refuses a program that is ours, or is interpreted by ours, in the current root and directory.
    ///
    /// What can't be read is left to the kernel: a script that the user may execute and not read runs nothing of ours, unless
    /// that user is root without its usual capabilities.
    pub fn refuse(self, program: &Path) -> Result<(), Failure> {
        let mut next = program.to_owned();
        for _ in 0..MAX_DEPTH {
            let Ok(found) = std::fs::metadata(&next) else {
                break;
            };
            if FileId::from(&found) == self.0 {
                return Err(Failure::program(format!(
                    "exec: \"{}\": containers can't run the program that starts them",
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

/// What interprets a program: a script's by its first line, another's by its header.
fn interpreter(program: &Path) -> io::Result<Option<PathBuf>> {
    // A pipe must not hold us up.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(program, flags, Mode::empty())?);
    let mut line = [0; FIRST_LINE];
    let read = file.read_at(&mut line, 0)?;
    let name = match of_script(&line[..read]) {
        Some(name) => Some(name.to_owned()),
        None => linux::elf::interpreter(&file)?,
    };
    Ok(name.map(|name| PathBuf::from(OsStr::from_bytes(&name))))
}

/// As the kernel reads it: the first word after `#!`.
fn of_script(line: &[u8]) -> Option<&[u8]> {
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
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_first_word_of_a_script_is_its_interpreter() {
        assert_eq!(of_script(b"#!/bin/sh\n"), Some(&b"/bin/sh"[..]));
        assert_eq!(of_script(b"#! \t/a -b c"), Some(&b"/a"[..]));
        assert_eq!(of_script(b"#!/cut"), Some(&b"/cut"[..]));
        assert_eq!(of_script(b"#! "), None);
        assert_eq!(of_script(b"echo"), None);
    }

    #[test]
    fn our_program_is_refused_however_it_is_named() {
        let own = OwnProgram::find().unwrap();
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
            let refused = own.refuse(&at(name)).unwrap_err();
            assert!(refused.program && refused.message.contains(name), "{name}");
        }

        // A program with a dynamic linker of its own choice.
        let shell = std::fs::read("/bin/sh").unwrap();
        let linker = linux::elf::interpreter(&File::open("/bin/sh").unwrap());
        let linker = linker.unwrap().unwrap();
        let place = shell.windows(linker.len()).position(|part| part == linker);
        let mut other = shell.clone();
        let name = b"/proc/self/exe\0";
        other[place.unwrap()..][..name.len()].copy_from_slice(name);
        std::fs::write(at("linked"), other).unwrap();
        assert!(own.refuse(&at("linked")).is_err());

        script("plain", Path::new("/bin/sh"));
        script("round", &at("round"));
        std::fs::create_dir(at("dir")).unwrap();
        for name in ["plain", "round", "dir", "none"] {
            assert!(own.refuse(&at(name)).is_ok(), "{name}");
        }
        assert!(own.refuse(Path::new("/bin/sh")).is_ok());
    }
}
