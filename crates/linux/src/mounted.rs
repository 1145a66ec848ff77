//! What is mounted where, as this process sees it. Asks the kernel and never the file systems themselves, one of which may
//! be served by a process that doesn't answer.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether something is mounted on `place`, an absolute path without links.
pub fn is_mounted(place: &Path) -> io::Result<bool> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(places(&text).any(|found| Path::new(OsStr::from_bytes(&found)) == place))
}

/// The mount points in the text of `/proc/PID/mountinfo`.
fn places(text: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    text.split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(unescape)
}

/// A field of mountinfo as it is: spaces and their kin are written as a backslash and three octal digits there.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok();
        match after.get(..3).filter(|_| first == b'\\').and_then(octal) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read() {
        let text = b"36 35 98:0 / / rw - ext3 /dev/root rw\n37 36 0:5 /x /a\\040b\\134 rw shared:1 - tmpfs t rw\nbad\n";
        let found: Vec<_> = places(text).collect();
        assert_eq!(found, [b"/".to_vec(), b"/a b\\".to_vec()]);
    }

    #[test]
    fn proc_is_mounted() {
        assert!(is_mounted(Path::new("/proc")).unwrap());
        assert!(!is_mounted(Path::new("/proc/self")).unwrap());
    }
}
