//! Header blocks: zlib-compressed names and values, with one compression state per direction of the connection.

use bytes::{Buf, Bytes};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::SpdyError;
use super::dictionary::DICTIONARY;
use crate::streams::Headers;

/// Limit for a decompressed block. Kubernetes clients send about a hundred bytes.
const MAX_BLOCK_SIZE: usize = 64 * 1024;
const MAX_HEADERS: u32 = 128;

/// Reads the blocks of one direction. All must be read, in order, since each depends on the previous ones.
pub(super) struct HeaderReader(Decompress);

impl HeaderReader {
    pub(super) fn new() -> Self {
        Self(Decompress::new(true))
    }

    pub(super) fn read(&mut self, block: &[u8]) -> Result<Headers, SpdyError> {
        parse(self.inflate(block)?.into())
    }

    fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, SpdyError> {
        let mut plain = Vec::with_capacity(1024);
        let mut room = [0; 4096];
        loop {
            let (read, written) = (self.0.total_in(), self.0.total_out());
            let done = self.0.decompress(block, &mut room, FlushDecompress::Sync);
            // Both fit: they are at most the lengths of the slices.
            let read = (self.0.total_in() - read) as usize;
            let written = (self.0.total_out() - written) as usize;
            block = block.get(read..).unwrap_or_default();
            plain.extend_from_slice(room.get(..written).unwrap_or_default());
            if plain.len() > MAX_BLOCK_SIZE {
                return Err(SpdyError::HeadersTooLarge);
            }
            match done {
                Ok(Status::StreamEnd) => return Err(SpdyError::Compression),
                Ok(Status::Ok | Status::BufError) => {}
                Err(error) if error.needs_dictionary().is_some() => {
                    let set = self.0.set_dictionary(&DICTIONARY);
                    set.map_err(|_| SpdyError::Compression)?;
                    continue;
                }
                Err(_) => return Err(SpdyError::Compression),
            }
            if written < room.len() {
                // The block is exhausted: a flushed block leaves no pending output.
                return if block.is_empty() {
                    Ok(plain)
                } else {
                    Err(SpdyError::Compression)
                };
            }
        }
    }
}

fn parse(mut plain: Bytes) -> Result<Headers, SpdyError> {
    let number = |plain: &mut Bytes| plain.try_get_u32().map_err(|_| SpdyError::Headers);
    let text = |plain: &mut Bytes| {
        let length = number(plain)? as usize;
        if length > plain.len() {
            return Err(SpdyError::Headers);
        }
        String::from_utf8(plain.split_to(length).into()).map_err(|_| SpdyError::Headers)
    };
    let count = number(&mut plain)?;
    if count > MAX_HEADERS {
        return Err(SpdyError::HeadersTooLarge);
    }
    let headers = (0..count).map(|_| Ok((text(&mut plain)?, text(&mut plain)?)));
    let headers = headers.collect::<Result<Vec<_>, SpdyError>>()?;
    if !plain.is_empty() {
        return Err(SpdyError::Headers);
    }
    Ok(Headers::new(headers))
}

/// Writes the blocks of one direction.
pub(super) struct HeaderWriter(Compress);

impl HeaderWriter {
    pub(super) fn new() -> Self {
        let mut compress = Compress::new(Compression::fast(), true);
        // Fails only after data was compressed.
        let set = compress.set_dictionary(&DICTIONARY);
        debug_assert!(set.is_ok(), "a fresh compressor takes a dictionary");
        Self(compress)
    }

    pub(super) fn write(&mut self, headers: &[(&str, &str)]) -> Vec<u8> {
        let mut plain = (headers.len() as u32).to_be_bytes().to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend((text.len() as u32).to_be_bytes());
            plain.extend(text.as_bytes());
        }
        // At most the text and a few bytes for the flush, so one call is enough.
        let mut block = Vec::with_capacity(plain.len() + 64);
        let done = self.0.compress_vec(&plain, &mut block, FlushCompress::Sync);
        debug_assert!(done.is_ok(), "there is room for the whole block");
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_round_trip_in_order() {
        let (mut writer, mut reader) = (HeaderWriter::new(), HeaderReader::new());
        for kind in ["error", "stdin", "stdout"] {
            let block = writer.write(&[("streamtype", kind), ("port", "80")]);
            let headers = reader.read(&block).unwrap();
            assert_eq!(headers.get("streamType"), Some(kind));
            assert_eq!(headers.get("port"), Some("80"));
            assert_eq!(headers.get("requestid"), None);
        }
        assert_eq!(reader.read(&writer.write(&[])).unwrap().get("port"), None);
    }

    #[test]
    fn decompression_bomb_is_rejected() {
        let (mut writer, mut reader) = (HeaderWriter::new(), HeaderReader::new());
        let zeros = "0".repeat(4 << 20);
        let mut block = Vec::with_capacity(1 << 20);
        let plain = [&1_u32.to_be_bytes()[..], zeros.as_bytes()].concat();
        let done = writer
            .0
            .compress_vec(&plain, &mut block, FlushCompress::Sync);
        done.unwrap();
        assert!(block.len() < 64 * 1024);
        assert_eq!(reader.read(&block).err(), Some(SpdyError::HeadersTooLarge));
    }

    #[test]
    fn invalid_blocks_are_rejected() {
        assert_eq!(
            HeaderReader::new().read(b"hello").err(),
            Some(SpdyError::Compression)
        );
        assert_eq!(
            HeaderReader::new().read(b"").err(),
            Some(SpdyError::Headers)
        );
        let mut writer = HeaderWriter::new();
        let block = writer.write(&[("a", "b")]);
        let cut = &block[..block.len() - 6];
        assert!(HeaderReader::new().read(cut).is_err());
    }

    #[test]
    fn wrong_counts_and_lengths_are_rejected() {
        let plain = |bytes: &[u8]| parse(Bytes::copy_from_slice(bytes)).err();
        assert_eq!(plain(&[0, 0, 0, 1]), Some(SpdyError::Headers));
        assert_eq!(plain(&[0xff; 4]), Some(SpdyError::HeadersTooLarge));
        assert_eq!(
            plain(&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 1]),
            Some(SpdyError::Headers)
        );
        assert_eq!(plain(&[0, 0, 0, 0, 1]), Some(SpdyError::Headers));
        let not_text = [0, 0, 0, 1, 0, 0, 0, 1, 0xff, 0, 0, 0, 0];
        assert_eq!(plain(&not_text), Some(SpdyError::Headers));
    }
}
