//! Copies the content of a file: by reflink if the file system supports it, otherwise without the holes.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Copies the content of `from` to the new file `to`.
pub fn copy(from: &OwnedFd, to: &OwnedFd, size: u64, buffer: &mut [u8]) -> io::Result<()> {
    if size == 0 || rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    rustix::fs::ftruncate(to, size)?;
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            // The rest is a hole.
            Err(Errno::NXIO) => break,
            // The file system does not support SEEK_DATA.
            Err(_) => at,
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start)).unwrap_or(size);
        let end = end.clamp(start + 1, size.max(start + 1));
        copy_range(from, to, start, end, buffer)?;
        at = end;
    }
    Ok(())
}

fn copy_range(
    from: &OwnedFd,
    to: &OwnedFd,
    mut at: u64,
    end: u64,
    buffer: &mut [u8],
) -> io::Result<()> {
    // Copy in the kernel while that works; which pairs of file systems it supports depends on its version.
    while at < end {
        let (mut source, mut target) = (at, at);
        let length = usize::try_from(end - at).unwrap_or(1 << 30).min(1 << 30);
        let copied =
            rustix::fs::copy_file_range(from, Some(&mut source), to, Some(&mut target), length);
        match copied {
            Ok(copied) if copied > 0 => at += copied as u64,
            Err(Errno::NOSPC) => return Err(Errno::NOSPC.into()),
            _ => break,
        }
    }
    while at < end {
        let length = usize::try_from(end - at).unwrap_or(usize::MAX);
        let length = length.min(buffer.len());
        let read = match rustix::io::pread(from, &mut buffer[..length], at) {
            Err(Errno::INTR) => continue,
            read => read?,
        };
        if read == 0 {
            break;
        }
        let mut written = 0;
        while written < read {
            match rustix::io::pwrite(to, &buffer[written..read], at + written as u64) {
                Err(Errno::INTR) => {}
                done => written += done?,
            }
        }
        at += read as u64;
    }
    Ok(())
}
