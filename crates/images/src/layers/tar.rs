//! A streaming reader for tar archives that may be hostile, with bounded memory.
//!
//! It supports the formats that image builders write: ustar, pax and GNU, with sparse files. Ambiguous entries
//! are interpreted like Go's archive/tar does, because other runtimes read layers with that: another
//! interpretation would give another image.

mod pax;
mod sparse;
#[cfg(test)]
pub mod testing;

use std::io::{self, Read};

pub use sparse::SparseSegment;

/// The largest extension header (long names, pax records).
pub const MAX_EXTENSION_HEADER: u64 = 1 << 20;

const BLOCK: usize = 512;

/// The type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A hard link to an earlier entry.
    HardLink,
    /// A named pipe.
    Fifo,
    /// A character or block device.
    Device,
}

/// One entry. Its data is read from the archive afterwards.
#[derive(Debug, Clone)]
pub struct TarEntry {
    /// The path, unchecked.
    pub path: Vec<u8>,
    /// The target of a link, unchecked.
    pub link: Vec<u8>,
    /// The type.
    pub kind: EntryKind,
    /// Permissions, including setuid, setgid and sticky bits.
    pub mode: u32,
    /// The owner.
    pub uid: u64,
    /// The group.
    pub gid: u64,
    /// Modification time: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// The size of a file, including holes.
    pub size: u64,
    /// The data segments of a sparse file.
    pub segments: Option<Vec<SparseSegment>>,
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// An archive being read.
#[derive(Debug)]
pub struct TarReader<R> {
    inner: R,
    /// Unread bytes of the current entry's data.
    remaining: u64,
    /// Padding after the data, up to a whole block.
    padding: u64,
}

fn invalid(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

impl<R: Read> TarReader<R> {
    /// Reads an archive from `inner`.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            remaining: 0,
            padding: 0,
        }
    }

    /// The next entry, or `None` at the end. Skips unread data of the previous one.
    pub fn next(&mut self) -> io::Result<Option<TarEntry>> {
        let (mut long_name, mut long_link) = (None, None);
        let mut pax = pax::PaxRecords::default();
        loop {
            self.skip()?;
            let Some(block) = self.block()? else {
                return Ok(None);
            };
            let header = Header(&block);
            let size = header.size()?;
            match header.kind() {
                b'L' => long_name = Some(truncate_at_nul(self.extension(size)?)),
                b'K' => long_link = Some(truncate_at_nul(self.extension(size)?)),
                b'x' => pax = pax::PaxRecords::parse(&self.extension(size)?)?,
                // Global records would apply to all later entries. Go ignores them too.
                b'g' => drop(self.extension(size)?),
                // A volume label.
                b'V' => self.begin_data(size)?,
                _ => return self.entry(&header, pax, long_name, long_link).map(Some),
            }
        }
    }

    fn entry(
        &mut self,
        header: &Header<'_>,
        pax: pax::PaxRecords,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> io::Result<TarEntry> {
        let path = long_name
            .or(pax.sparse.name.clone())
            .or(pax.path)
            .unwrap_or_else(|| header.path());
        let kind = match header.kind() {
            b'0' | 0 | b'7' if path.ends_with(b"/") => EntryKind::Directory,
            b'0' | 0 | b'7' | b'S' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' | b'4' => EntryKind::Device,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => {
                return Err(invalid(format!(
                    "{} has the unknown type {:?}",
                    path.escape_ascii(),
                    char::from(other)
                )));
            }
        };
        let stored_size = match kind {
            EntryKind::File => pax.size.map_or_else(|| header.size(), Ok)?,
            // The other types have no data, whatever the header says.
            _ => 0,
        };
        // In the old GNU format the sparse map is between header and data.
        let old_map = match header.kind() {
            b'S' => Some(sparse::read_old_gnu(header.0, || {
                self.block()?
                    .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
            })?),
            _ => None,
        };
        self.begin_data(stored_size)?;
        let sparse = match old_map {
            Some(map) => Some(map),
            None if kind == EntryKind::File => sparse::read_pax(&pax.sparse, &mut *self)?,
            None => None,
        };
        let (size, segments) = match sparse {
            Some(sparse) => {
                sparse.check(self.remaining)?;
                (sparse.size, Some(sparse.segments))
            }
            None => (stored_size, None),
        };
        Ok(TarEntry {
            link: long_link.or(pax.link).unwrap_or_else(|| header.link()),
            kind,
            mode: u32::try_from(header.number(100..108)? & 0o7777).unwrap_or(0),
            uid: pax.uid.map_or_else(|| header.number(108..116), Ok)?,
            gid: pax.gid.map_or_else(|| header.number(116..124), Ok)?,
            mtime: match pax.mtime {
                Some(mtime) => mtime,
                None => (
                    i64::try_from(header.number(136..148)?).unwrap_or(i64::MAX),
                    0,
                ),
            },
            size,
            segments,
            xattrs: pax.xattrs,
            path,
        })
    }

    /// Sets the length of the current entry's data.
    fn begin_data(&mut self, size: u64) -> io::Result<()> {
        self.remaining = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        match size > i64::MAX as u64 {
            true => Err(invalid("an entry is larger than the largest file")),
            false => Ok(()),
        }
    }

    /// Reads a whole extension header.
    fn extension(&mut self, size: u64) -> io::Result<Vec<u8>> {
        if size > MAX_EXTENSION_HEADER {
            return Err(invalid(format!("an extension header has {size} bytes")));
        }
        self.begin_data(size)?;
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self) -> io::Result<()> {
        let rest = self.remaining + self.padding;
        let skipped = io::copy(&mut (&mut self.inner).take(rest), &mut io::sink())?;
        // Some archives lack the padding of the last entry.
        if skipped < self.remaining {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (self.remaining, self.padding) = (0, 0);
        Ok(())
    }

    /// The next header; `None` at the end of the file or at a block of zeros.
    fn block(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let (mut block, mut at) = ([0; BLOCK], 0);
        while at < BLOCK {
            match self.inner.read(&mut block[at..]) {
                Ok(0) if at == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => at += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(block.iter().any(|byte| *byte != 0).then_some(block))
    }

    /// The rest of the stream, so that it can be hashed.
    pub fn into_inner(self) -> R {
        self.inner
    }
}

/// The data of the current entry.
impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = buffer
            .len()
            .min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        if limit == 0 {
            return Ok(0);
        }
        match self.inner.read(&mut buffer[..limit])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.remaining -= n as u64;
                Ok(n)
            }
        }
    }
}

/// A header block.
struct Header<'a>(&'a [u8; BLOCK]);

impl Header<'_> {
    fn kind(&self) -> u8 {
        self.0[156]
    }

    /// The size of the data, after a check of the header's checksum.
    fn size(&self) -> io::Result<u64> {
        let sum = |byte: fn(u8) -> i64| -> i64 {
            let all = self.0.iter().enumerate();
            all.map(|(at, value)| match at {
                148..156 => 32,
                _ => byte(*value),
            })
            .sum()
        };
        let expected = i64::try_from(self.number(148..156)?).unwrap_or(-1);
        // Historic writers summed signed bytes.
        if sum(i64::from) != expected && sum(|byte| i64::from(byte.cast_signed())) != expected {
            return Err(invalid("a header's checksum is wrong: not a tar archive"));
        }
        self.number(124..136)
    }

    fn number(&self, field: std::ops::Range<usize>) -> io::Result<u64> {
        number(&self.0[field])
    }

    fn path(&self) -> Vec<u8> {
        let name = until_nul(&self.0[..100]);
        // GNU headers use the prefix field otherwise.
        let prefix = match &self.0[257..263] {
            b"ustar\0" => until_nul(&self.0[345..500]),
            _ => b"",
        };
        match prefix {
            b"" => name.to_vec(),
            prefix => [prefix, b"/", name].concat(),
        }
    }

    fn link(&self) -> Vec<u8> {
        until_nul(&self.0[157..257]).to_vec()
    }
}

/// Octal text, or, if the highest bit is set, a binary number.
fn number(field: &[u8]) -> io::Result<u64> {
    let malformed = || invalid("a number in a header is malformed");
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let mut value = u64::from(field[0] & 0x3f);
        for byte in &field[1..] {
            value = value
                .checked_mul(256)
                .ok_or_else(malformed)?
                .checked_add(u64::from(*byte))
                .ok_or_else(malformed)?;
        }
        return if negative {
            Err(malformed())
        } else {
            Ok(value)
        };
    }
    let text = std::str::from_utf8(until_nul(field)).map_err(|_| malformed())?;
    match text.trim() {
        "" => Ok(0),
        digits => u64::from_str_radix(digits, 8).map_err(|_| malformed()),
    }
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn truncate_at_nul(mut name: Vec<u8>) -> Vec<u8> {
    let end = until_nul(&name).len();
    name.truncate(end);
    name
}
