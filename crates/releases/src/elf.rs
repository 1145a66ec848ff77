//! Checks whether a file is a program for this architecture.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// ELF's `e_machine` and Rust's name of each known architecture.
const MACHINES: [(u16, &str); 5] = [
    (62, "x86_64"),
    (183, "aarch64"),
    (21, "powerpc64"),
    (22, "s390x"),
    (243, "riscv64"),
];

/// The reason why a file is not a program for this architecture.
#[derive(Debug, thiserror::Error)]
pub enum ProgramCheckError {
    /// Not an ELF file.
    #[error("it is not an ELF program")]
    NotElf,
    /// An object file, a core dump, or a 32-bit program.
    #[error("it is an ELF file, but not a 64-bit program")]
    OtherElf,
    /// A program for another architecture.
    #[error("it is a program for {found}, and this machine is {wanted}", wanted = std::env::consts::ARCH)]
    OtherMachine {
        /// The name of that architecture.
        found: String,
    },
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Io(io::Error),
}

/// Checks the ELF header of a file.
pub fn check_program(path: &Path) -> Result<(), ProgramCheckError> {
    let mut header = Vec::new();
    File::open(path)
        .and_then(|file| file.take(20).read_to_end(&mut header))
        .map_err(ProgramCheckError::Io)?;
    check_header(&header, std::env::consts::ARCH)
}

fn check_header(header: &[u8], arch: &str) -> Result<(), ProgramCheckError> {
    let Ok(header) = <&[u8; 20]>::try_from(header) else {
        return Err(ProgramCheckError::NotElf);
    };
    if !header.starts_with(b"\x7fELF") {
        return Err(ProgramCheckError::NotElf);
    }
    let little_endian = header[5] != 2;
    let half = |at: usize| {
        let bytes = [header[at], header[at + 1]];
        if little_endian {
            u16::from_le_bytes(bytes)
        } else {
            u16::from_be_bytes(bytes)
        }
    };
    let (kind, machine) = (half(16), half(18));
    // ELFCLASS64, and ET_EXEC or ET_DYN (position-independent).
    if header[4] != 2 || !matches!(kind, 2 | 3) {
        return Err(ProgramCheckError::OtherElf);
    }
    let found = MACHINES
        .iter()
        .find(|(number, _)| *number == machine)
        .map(|(_, name)| *name);
    // Both byte orders of POWER have the same `e_machine`.
    if found == Some(arch) && little_endian == cfg!(target_endian = "little") {
        return Ok(());
    }
    Err(ProgramCheckError::OtherMachine {
        found: found.map_or_else(|| format!("ELF machine {machine}"), str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(class: u8, kind: u8, machine: u8) -> Vec<u8> {
        let mut header = b"\x7fELF".to_vec();
        header.extend([class, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, kind, 0, machine, 0]);
        header
    }

    #[test]
    fn test_binary_is_a_program() {
        check_program(&std::env::current_exe().unwrap()).unwrap();
    }

    #[test]
    fn other_files_are_classified() {
        let check = |header: &[u8]| check_header(header, "x86_64").map_err(|e| e.to_string());
        assert_eq!(check(&header(2, 2, 62)), Ok(()));
        assert_eq!(check(&header(2, 3, 62)), Ok(()));
        for text in [&b""[..], b"#!/bin/sh\necho Kubernetes", b"\x7fELF"] {
            assert_eq!(check(text).unwrap_err(), "it is not an ELF program");
        }
        for elf in [header(1, 2, 62), header(2, 1, 62), header(2, 4, 62)] {
            assert_eq!(
                check(&elf).unwrap_err(),
                "it is an ELF file, but not a 64-bit program"
            );
        }
        assert!(
            check(&header(2, 2, 183))
                .unwrap_err()
                .starts_with("it is a program for aarch64, and this machine is ")
        );
        assert!(
            check(&header(2, 2, 8))
                .unwrap_err()
                .starts_with("it is a program for ELF machine 8")
        );
    }
}
