//! Reads the parts of an ELF file that the kernel uses: its segments and its interpreter.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const LOAD: u32 = 1;
const INTERPRETER: u32 = 3;
/// The kernel's limits.
const MAX_NAME: u64 = 4096;
const MAX_SEGMENTS: u16 = 512;

/// Offsets of fields in 64-bit and 32-bit files.
struct Layout {
    /// `e_phoff`, `e_phentsize` and `e_phnum` of the header.
    header: (usize, usize, usize),
    /// `p_offset` and `p_filesz` of a segment, whose `p_type` comes first.
    segment: (usize, usize),
    /// Whether offsets are 64-bit.
    wide: bool,
}

const BITS_64: Layout = Layout {
    header: (32, 54, 56),
    segment: (8, 32),
    wide: true,
};
const BITS_32: Layout = Layout {
    header: (28, 42, 44),
    segment: (4, 16),
    wide: false,
};

struct Segment {
    kind: u32,
    offset: u64,
    length: u64,
}

/// The length of the part of the file that is loaded. The rest, such as debug information, is not needed to run it. `None` if
/// the file is not an ELF file.
pub fn loaded_length(file: &File) -> io::Result<Option<u64>> {
    let segments = segments(file)?;
    let loaded = segments.iter().filter(|segment| segment.kind == LOAD);
    let ends = loaded.map(|segment| segment.offset.saturating_add(segment.length));
    Ok(ends.max())
}

/// The interpreter of a program, usually the dynamic linker.
pub fn interpreter(file: &File) -> io::Result<Option<Vec<u8>>> {
    let segments = segments(file)?;
    let Some(found) = segments.iter().find(|found| found.kind == INTERPRETER) else {
        return Ok(None);
    };
    let mut name = vec![0; found.length.min(MAX_NAME) as usize];
    file.read_exact_at(&mut name, found.offset)?;
    let end = name.iter().position(|byte| *byte == 0);
    name.truncate(end.unwrap_or(name.len()));
    Ok(Some(name))
}

fn segments(file: &File) -> io::Result<Vec<Segment>> {
    let mut header = [0; 64];
    let read = file.read_at(&mut header, 0)?;
    if read < 52 || !header.starts_with(b"\x7fELF") {
        return Ok(Vec::new());
    }
    let layout = match header[4] {
        2 => BITS_64,
        _ => BITS_32,
    };
    let (table, size, count) = layout.header;
    let table = number(&header, table, if layout.wide { 8 } else { 4 });
    let size = number(&header, size, 2);
    let count = number(&header, count, 2).min(MAX_SEGMENTS.into());
    let mut segments = Vec::new();
    for index in 0..count {
        let mut entry = [0; 56];
        let entry = &mut entry[..if layout.wide { 56 } else { 32 }];
        let Some(at) = table.checked_add(index * size) else {
            break;
        };
        if file.read_exact_at(entry, at).is_err() {
            break;
        }
        let width = if layout.wide { 8 } else { 4 };
        segments.push(Segment {
            kind: number(entry, 0, 4) as u32,
            offset: number(entry, layout.segment.0, width),
            length: number(entry, layout.segment.1, width),
        });
    }
    Ok(segments)
}

/// Reads a number in little-endian byte order, which x86 programs have.
fn number(bytes: &[u8], at: usize, width: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..width].copy_from_slice(&bytes[at..at + width]);
    u64::from_le_bytes(wide)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreter_and_loaded_length_are_found() {
        let shell = File::open("/bin/sh").unwrap();
        let name = interpreter(&shell).unwrap().unwrap();
        assert!(name.starts_with(b"/lib"), "{name:?}");
        let loaded = loaded_length(&shell).unwrap().unwrap();
        assert!(loaded > 4096 && loaded <= shell.metadata().unwrap().len());
    }

    #[test]
    fn invalid_files_have_neither() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for content in [&b"#!/bin/sh\n"[..], b"", b"\x7fELF\x02", &[0xff; 80]] {
            std::fs::write(&path, content).unwrap();
            let file = File::open(&path).unwrap();
            assert_eq!(interpreter(&file).unwrap(), None);
            assert_eq!(loaded_length(&file).unwrap(), None);
        }
        // The program header table is beyond the end of the file.
        let mut lying = b"\x7fELF\x02".to_vec();
        lying.resize(64, 0xff);
        std::fs::write(&path, lying).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(loaded_length(&file).unwrap(), None);
    }
}
