//! Decompression. The format is detected from the first bytes, because media types are often wrong.

use std::io::{self, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

/// The compression format of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Uncompressed.
    None,
    /// gzip, with one or several members.
    Gzip,
    /// Zstandard, with one or several frames.
    Zstd,
}

/// The largest window of a zstd stream, as a power of two: the default of `zstd`. It bounds memory.
const MAX_WINDOW_LOG: u32 = 27;

impl Compression {
    /// Detects the format from the first bytes.
    pub fn of(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
            // A skippable frame; zstd:chunked may start with one.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }

    /// The suffix of OCI's media type for a layer.
    pub fn suffix(self) -> &'static str {
        match self {
            Compression::None => "",
            Compression::Gzip => "+gzip",
            Compression::Zstd => "+zstd",
        }
    }
}

/// Decompresses a stream; an uncompressed one passes unchanged.
pub fn decompress<'a>(stream: impl Read + 'a) -> io::Result<(Compression, Box<dyn Read + 'a>)> {
    let (start, stream) = peek(stream)?;
    let compression = Compression::of(&start);
    let stream = BufReader::with_capacity(256 << 10, stream);
    let inner: Box<dyn Read + 'a> = match compression {
        Compression::None => Box::new(stream),
        Compression::Gzip => Box::new(MultiGzDecoder::new(stream)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(stream)?;
            decoder.window_log_max(MAX_WINDOW_LOG)?;
            Box::new(decoder)
        }
    };
    Ok((compression, inner))
}

/// The first four bytes, and the whole stream including them. A pipe may deliver them one at a time.
pub fn peek<R: Read>(mut stream: R) -> io::Result<(Vec<u8>, impl Read + use<R>)> {
    let mut start = Vec::new();
    stream.by_ref().take(4).read_to_end(&mut start)?;
    Ok((start.clone(), io::Cursor::new(start).chain(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Returns at most this many bytes per read.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let limit = buffer.len().min(self.1);
            self.0.read(&mut buffer[..limit])
        }
    }

    #[test]
    fn all_formats_are_decompressed() {
        let gzip = |text: &[u8]| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        };
        let zstd = |text: &[u8]| zstd::encode_all(text, 1).unwrap();
        for (stream, kind) in [
            (b"onetwo".to_vec(), Compression::None),
            ([gzip(b"one"), gzip(b"two")].concat(), Compression::Gzip),
            ([zstd(b"one"), zstd(b"two")].concat(), Compression::Zstd),
        ] {
            for limit in [1, 3, 1000] {
                let pipe = Slow(&stream, limit);
                let (found, mut inner) = decompress(pipe).unwrap();
                let mut text = String::new();
                inner.read_to_string(&mut text).unwrap();
                assert_eq!((found, text.as_str()), (kind, "onetwo"));
            }
        }
        let (_, mut inner) = decompress(&b""[..]).unwrap();
        assert_eq!(inner.read(&mut [0; 1]).unwrap(), 0);
    }
}
