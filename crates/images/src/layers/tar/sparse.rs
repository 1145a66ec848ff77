//! Sparse files. GNU tar writes them; Go's archive/tar does not.

use std::io::{self, Read};

use super::pax::{self, decimal};
use super::{BLOCK, invalid, number};

/// Bounds the memory for a sparse map.
const MAX_SEGMENTS: usize = 1 << 16;

/// A piece of data in a sparse file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseSegment {
    /// Its offset in the file.
    pub offset: u64,
    /// Its length.
    pub length: u64,
}

/// The size and the data segments of a sparse file.
#[derive(Debug)]
pub struct SparseFile {
    pub size: u64,
    pub segments: Vec<SparseSegment>,
}

impl SparseFile {
    /// Checks that the segments are in order, within the file, and add up to the stored bytes.
    pub fn check(&self, stored: u64) -> io::Result<()> {
        let malformed = || invalid("the map of a sparse file is malformed");
        let (mut end, mut sum) = (0, 0u64);
        for segment in &self.segments {
            if segment.offset < end {
                return Err(malformed());
            }
            let next = segment.offset.checked_add(segment.length);
            end = next
                .filter(|next| *next <= self.size)
                .ok_or_else(malformed)?;
            sum = sum.checked_add(segment.length).ok_or_else(malformed)?;
        }
        match sum == stored && self.size <= i64::MAX as u64 {
            true => Ok(()),
            false => Err(malformed()),
        }
    }
}

/// The old GNU format: four segments in the header, and 21 in each following block.
pub fn read_old_gnu(
    header: &[u8; BLOCK],
    mut next: impl FnMut() -> io::Result<[u8; BLOCK]>,
) -> io::Result<SparseFile> {
    let mut segments = Vec::new();
    let mut take = |fields: &[u8]| -> io::Result<()> {
        for field in fields.chunks_exact(24) {
            if field[0] == 0 {
                break;
            }
            segments.push(SparseSegment {
                offset: number(&field[..12])?,
                length: number(&field[12..])?,
            });
        }
        match segments.len() > MAX_SEGMENTS {
            true => Err(invalid("a sparse file has too many segments")),
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

/// The pax formats: the map is in the records, or, in version 1.0, before the data.
pub fn read_pax(records: &pax::PaxSparse, data: &mut impl Read) -> io::Result<Option<SparseFile>> {
    let Some(size) = records.size else {
        return Ok(None);
    };
    let map = match records.major {
        Some(1) => read_map(data)?,
        _ => records.map.clone(),
    };
    if map.len() % 2 != 0 || map.len() / 2 > MAX_SEGMENTS {
        return Err(invalid("the map of a sparse file is malformed"));
    }
    let segments = map.chunks_exact(2).map(|pair| SparseSegment {
        offset: pair[0],
        length: pair[1],
    });
    Ok(Some(SparseFile {
        size,
        segments: segments.collect(),
    }))
}

/// The number of pairs, then the pairs, one number per line, padded to a whole block.
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
                    return Err(invalid("the map of a sparse file is malformed"));
                }
                continue;
            }
            numbers.push(decimal(&line)?);
            line.clear();
            let wanted = numbers[0].saturating_mul(2);
            if wanted > 2 * MAX_SEGMENTS as u64 {
                return Err(invalid("a sparse file has too many segments"));
            }
            if numbers.len() as u64 > wanted {
                numbers.remove(0);
                return Ok(numbers);
            }
        }
    }
}
