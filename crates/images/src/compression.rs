//! Compressed streams, recognised by their first bytes: media types are often wrong.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

/// How a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip, perhaps of several members.
    Gzip,
    /// Zstandard, perhaps of several frames.
    Zstd,
}

/// Memory that a zstd stream may ask for, as a power of two: what `zstd` itself allows.
const LARGEST_WINDOW: u32 = 27;

impl Compression {
    /// Recognises a stream by how it begins.
    pub fn of(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
            // A skippable frame, which zstd:chunked may begin with.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }

    /// What OCI's media type of a layer ends with.
    pub fn suffix(self) -> &'static str {
        match self {
            Compression::None => "",
            Compression::Gzip => "+gzip",
            Compression::Zstd => "+zstd",
        }
    }
}

/// Reads what is inside of a stream that may be compressed.
pub fn decompress<'a>(stream: impl Read + 'a) -> io::Result<(Compression, Box<dyn Read + 'a>)> {
    let mut stream = BufReader::with_capacity(256 << 10, stream);
    let compression = Compression::of(fill(&mut stream)?);
    let inner: Box<dyn Read + 'a> = match compression {
        Compression::None => Box::new(stream),
        Compression::Gzip => Box::new(MultiGzDecoder::new(stream)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(stream)?;
            decoder.window_log_max(LARGEST_WINDOW)?;
            Box::new(decoder)
        }
    };
    Ok((compression, inner))
}

/// The buffer, with at least one byte unless the stream is empty. A pipe may give as little as that, so
/// a second read is no more certain than the first: files and sockets give all that is needed at once.
fn fill(stream: &mut impl BufRead) -> io::Result<&[u8]> {
    loop {
        match stream.fill_buf() {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    stream.fill_buf()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn streams_of_all_kinds_are_read() {
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
            let (found, mut inner) = decompress(&stream[..]).unwrap();
            let mut text = String::new();
            inner.read_to_string(&mut text).unwrap();
            assert_eq!((found, text.as_str()), (kind, "onetwo"));
        }
        let (_, mut inner) = decompress(&b""[..]).unwrap();
        assert_eq!(inner.read(&mut [0; 1]).unwrap(), 0);
    }
}
