//! The mount table of this process, from `/proc/self/mountinfo`. These functions never access a mounted file system: its server
//! may not respond.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, StatxFlags};

/// Whether something is mounted on `target`, an absolute path without symbolic links.
pub fn is_mounted(target: &Path) -> io::Result<bool> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(mount_points(&text).any(|found| Path::new(OsStr::from_bytes(&found)) == target))
}

/// The id, in `/proc/PID/mountinfo`, of the mount that holds an open file. Two mounts of one file system have different ids.
pub fn mount_id(file: impl AsFd) -> io::Result<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
    let status = rustix::fs::statx(file.as_fd(), c"", flags, StatxFlags::MNT_ID)?;
    if status.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
        return Err(io::Error::other("the kernel does not report mount ids"));
    }
    Ok(status.stx_mnt_id)
}

/// The id of the parent mount of `id` in the text of a mountinfo file; the root of a mount namespace may be its own parent.
pub(crate) fn parent_id(text: &[u8], id: u64) -> Option<u64> {
    let number = |field: Option<&[u8]>| std::str::from_utf8(field?).ok()?.parse().ok();
    text.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        (number(fields.next()) == Some(id)).then(|| number(fields.next()))?
    })
}

/// The mount points in the text of `/proc/PID/mountinfo`.
fn mount_points(text: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    text.split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(unescape)
}

/// Decodes a field of mountinfo, where spaces and other special characters are a backslash and three octal digits.
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
    fn mount_points_are_unescaped() {
        let text = b"36 35 98:0 / / rw - ext3 /dev/root rw\n37 36 0:5 /x /a\\040b\\134 rw shared:1 - tmpfs t rw\nbad\n";
        let found: Vec<_> = mount_points(text).collect();
        assert_eq!(found, [b"/".to_vec(), b"/a b\\".to_vec()]);
    }

    #[test]
    fn mounts_have_an_id_and_a_parent() {
        let text = std::fs::read("/proc/self/mountinfo").unwrap();
        let [root, proc] =
            ["/", "/proc"].map(|path| mount_id(std::fs::File::open(path).unwrap()).unwrap());
        assert_ne!(root, proc);
        assert_eq!(parent_id(&text, proc), Some(root));
        assert_eq!(parent_id(b"1 1 0:2 / / rw - rootfs none rw\n", 1), Some(1));
        assert_eq!(parent_id(b"", 1), None);
    }

    #[test]
    fn proc_is_mounted() {
        assert!(is_mounted(Path::new("/proc")).unwrap());
        assert!(!is_mounted(Path::new("/proc/self")).unwrap());
    }
}
