//! Reading a tar archive that may be hostile, as a stream and with bounded memory.
//!
//! The formats are those that image builders write: ustar, pax and GNU, with sparse files. Where they
//! leave room, entries are understood as Go's archive/tar does, because that is what everybody else
//! reads layers with: two readings of one archive would be two different images.

mod pax;
mod sparse;
#[cfg(test)]
pub mod testing;

use std::io::{self, Read};

pub use sparse::Segment;

/// Extension headers (long names, pax records) may be no larger.
pub const LARGEST_HEADER: u64 = 1 << 20;

const BLOCK: usize = 512;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
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

/// One entry; its data, if any, is read from the archive afterwards.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name, as it stands there.
    pub path: Vec<u8>,
    /// The target of a link.
    pub link: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permissions, with setuid and its kin.
    pub mode: u32,
    /// The owner.
    pub uid: u64,
    /// The group.
    pub gid: u64,
    /// When it was modified: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// The size of a file.
    pub size: u64,
    /// Where the data belongs, if not simply one after the other from the start.
    pub segments: Option<Vec<Segment>>,
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// An archive being read.
#[derive(Debug)]
pub struct Archive<R> {
    inner: R,
    /// What the current entry's data still has.
    left: u64,
    /// What follows it, up to a whole block.
    padding: u64,
}

fn bad(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

impl<R: Read> Archive<R> {
    /// Begins to read.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            left: 0,
            padding: 0,
        }
    }

    /// The next entry, or `None` at the end. Skips what wasn't read of the one before.
    pub fn next(&mut self) -> io::Result<Option<Entry>> {
        let (mut long_name, mut long_link) = (None, None);
        let mut pax = pax::Records::default();
        loop {
            self.skip()?;
            let Some(block) = self.block()? else {
                return Ok(None);
            };
            let header = Header(&block);
            let size = header.size()?;
            match header.kind() {
                b'L' => long_name = Some(cut(self.extension(size)?)),
                b'K' => long_link = Some(cut(self.extension(size)?)),
                b'x' => pax = pax::Records::parse(&self.extension(size)?)?,
                // Global records would change all that follows; nobody builds images with them,
                // and Go ignores them too.
                b'g' => drop(self.extension(size)?),
                // The name of a volume.
                b'V' => self.data(size)?,
                _ => return self.entry(&header, pax, long_name, long_link).map(Some),
            }
        }
    }

    fn entry(
        &mut self,
        header: &Header<'_>,
        pax: pax::Records,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> io::Result<Entry> {
        let path = long_name
            .or(pax.sparse.name.clone())
            .or(pax.path)
            .unwrap_or_else(|| header.path());
        let kind = match header.kind() {
            b'0' | 0 | b'7' if path.ends_with(b"/") => Kind::Directory,
            b'0' | 0 | b'7' | b'S' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' | b'4' => Kind::Device,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => {
                return Err(bad(format!(
                    "{} is of an unknown type {:?}",
                    path.escape_ascii(),
                    char::from(other)
                )));
            }
        };
        let stored = match kind {
            Kind::File => pax.size.map_or_else(|| header.size(), Ok)?,
            // Whatever the header says: nobody writes data for these.
            _ => 0,
        };
        // The map of an old sparse file stands between header and data.
        let old_map = match header.kind() {
            b'S' => Some(sparse::old(header.0, || {
                self.block()?
                    .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
            })?),
            _ => None,
        };
        self.data(stored)?;
        let sparse = match old_map {
            Some(map) => Some(map),
            None if kind == Kind::File => sparse::pax(&pax.sparse, &mut *self)?,
            None => None,
        };
        let (size, segments) = match sparse {
            Some(sparse) => {
                sparse.check(self.left)?;
                (sparse.size, Some(sparse.segments))
            }
            None => (stored, None),
        };
        Ok(Entry {
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

    /// Sets where the data of the current entry ends.
    fn data(&mut self, size: u64) -> io::Result<()> {
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        match size > i64::MAX as u64 {
            true => Err(bad("an entry is larger than any file can be")),
            false => Ok(()),
        }
    }

    /// Reads the whole of an extension header.
    fn extension(&mut self, size: u64) -> io::Result<Vec<u8>> {
        if size > LARGEST_HEADER {
            return Err(bad(format!("an extension header is {size} bytes large")));
        }
        self.data(size)?;
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self) -> io::Result<()> {
        let rest = self.left + self.padding;
        let skipped = io::copy(&mut (&mut self.inner).take(rest), &mut io::sink())?;
        // Some archives end without the last padding.
        if skipped < self.left {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (self.left, self.padding) = (0, 0);
        Ok(())
    }

    /// The next header; `None` at the end, which a block of zeros marks.
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

    /// The rest, so that its digest can be taken.
    pub fn into_inner(self) -> R {
        self.inner
    }
}

/// The data of the current entry.
impl<R: Read> Read for Archive<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if most == 0 {
            return Ok(0);
        }
        match self.inner.read(&mut buffer[..most])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.left -= n as u64;
                Ok(n)
            }
        }
    }
}

/// A block that holds a header.
struct Header<'a>(&'a [u8; BLOCK]);

impl Header<'_> {
    fn kind(&self) -> u8 {
        self.0[156]
    }

    /// The size of the data; the checksum is good if this is.
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
        // Ancient writers added signed bytes.
        if sum(i64::from) != expected && sum(|byte| i64::from(byte.cast_signed())) != expected {
            return Err(bad("a header's checksum is wrong: this is no tar archive"));
        }
        self.number(124..136)
    }

    fn number(&self, field: std::ops::Range<usize>) -> io::Result<u64> {
        number(&self.0[field])
    }

    fn path(&self) -> Vec<u8> {
        let name = until_zero(&self.0[..100]);
        // GNU uses the prefix for other things.
        let prefix = match &self.0[257..263] {
            b"ustar\0" => until_zero(&self.0[345..500]),
            _ => b"",
        };
        match prefix {
            b"" => name.to_vec(),
            prefix => [prefix, b"/", name].concat(),
        }
    }

    fn link(&self) -> Vec<u8> {
        until_zero(&self.0[157..257]).to_vec()
    }
}

/// Octal text, or, if the highest bit is set, a binary number.
fn number(field: &[u8]) -> io::Result<u64> {
    let wrong = || bad("a number in a header is malformed");
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let mut value = u64::from(field[0] & 0x3f);
        for byte in &field[1..] {
            value = value
                .checked_mul(256)
                .ok_or_else(wrong)?
                .checked_add(u64::from(*byte))
                .ok_or_else(wrong)?;
        }
        return if negative { Err(wrong()) } else { Ok(value) };
    }
    let text = std::str::from_utf8(until_zero(field)).map_err(|_| wrong())?;
    match text.trim() {
        "" => Ok(0),
        digits => u64::from_str_radix(digits, 8).map_err(|_| wrong()),
    }
}

fn until_zero(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn cut(mut name: Vec<u8>) -> Vec<u8> {
    let end = until_zero(&name).len();
    name.truncate(end);
    name
}
