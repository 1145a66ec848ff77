//! Files with holes. Go's own writer makes none, but GNU tar does.

use std::io::{self, Read};

use super::pax::{self, decimal};
use super::{BLOCK, bad, number};

/// More pieces than this make no sense, and would take memory.
const MOST_SEGMENTS: usize = 1 << 16;

/// A piece of data, and where it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its place in the file.
    pub offset: u64,
    /// Its length.
    pub length: u64,
}

/// A file with holes.
#[derive(Debug)]
pub struct SparseFile {
    pub size: u64,
    pub segments: Vec<Segment>,
}

impl SparseFile {
    /// The pieces must stand in order, inside of the file, and be exactly what is stored.
    pub fn check(&self, stored: u64) -> io::Result<()> {
        let wrong = || bad("the map of a sparse file is malformed");
        let (mut end, mut sum) = (0, 0u64);
        for segment in &self.segments {
            if segment.offset < end {
                return Err(wrong());
            }
            let next = segment.offset.checked_add(segment.length);
            end = next.filter(|next| *next <= self.size).ok_or_else(wrong)?;
            sum = sum.checked_add(segment.length).ok_or_else(wrong)?;
        }
        match sum == stored && self.size <= i64::MAX as u64 {
            true => Ok(()),
            false => Err(wrong()),
        }
    }
}

/// The old form: four pieces in the header, and 21 in each block that follows.
pub fn old(
    header: &[u8; BLOCK],
    mut next: impl FnMut() -> io::Result<[u8; BLOCK]>,
) -> io::Result<SparseFile> {
    let mut segments = Vec::new();
    let mut take = |fields: &[u8]| -> io::Result<()> {
        for field in fields.chunks_exact(24) {
            if field[0] == 0 {
                break;
            }
            segments.push(Segment {
                offset: number(&field[..12])?,
                length: number(&field[12..])?,
            });
        }
        match segments.len() > MOST_SEGMENTS {
            true => Err(bad("a sparse file has too many pieces")),
            false => Ok(()),
        }
    };
    take(&header[386..482])?;
    let mut more = header[482] != 0;
    while more {
        let block = next()?;
        take(&block[..504])?;
        more = block[504] != 0;
    }
    Ok(SparseFile {
        size: number(&header[483..495])?,
        segments,
    })
}

/// The pax forms: the map stands in the records, or, in version 1, before the data.
pub fn pax(records: &pax::Sparse, data: &mut impl Read) -> io::Result<Option<SparseFile>> {
    let Some(size) = records.size else {
        return Ok(None);
    };
    let map = match records.major {
        Some(1) => read_map(data)?,
        _ => records.map.clone(),
    };
    if map.len() % 2 != 0 || map.len() / 2 > MOST_SEGMENTS {
        return Err(bad("the map of a sparse file is malformed"));
    }
    let segments = map.chunks_exact(2).map(|pair| Segment {
        offset: pair[0],
        length: pair[1],
    });
    Ok(Some(SparseFile {
        size,
        segments: segments.collect(),
    }))
}

/// A number of pairs, then the pairs, each number on a line, filled up to a whole block.
fn read_map(data: &mut impl Read) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    let mut line = Vec::new();
    loop {
        let mut block = [0; BLOCK];
        data.read_exact(&mut block)?;
        for byte in block {
            if byte != b'\n' {
                line.push(byte);
                if line.len() > 20 {
                    return Err(bad("the map of a sparse file is malformed"));
                }
                continue;
            }
            numbers.push(decimal(&line)?);
            line.clear();
            let wanted = numbers[0].saturating_mul(2);
            if wanted > 2 * MOST_SEGMENTS as u64 {
                return Err(bad("a sparse file has too many pieces"));
            }
            if numbers.len() as u64 > wanted {
                numbers.remove(0);
                return Ok(numbers);
            }
        }
    }
}
