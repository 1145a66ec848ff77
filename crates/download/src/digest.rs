//! SHA-256 digests, by which OCI names blobs.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use aws_lc_rs::digest::{self, Context, SHA256};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A digest as it is written in manifests: `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// A string is not a digest.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0:?} is not a digest: expected sha256: and 64 hexadecimal digits")]
pub struct DigestError(String);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest::from_sha256(&digest::digest(&SHA256, bytes))
    }

    fn from_sha256(sha256: &digest::Digest) -> Digest {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(sha256.as_ref());
        Digest(bytes)
    }

    /// The hexadecimal digits without the prefix, as in file names.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Parses 64 lower-case hexadecimal digits.
    pub fn from_hex(hex: &str) -> Option<Digest> {
        let lower = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if hex.len() != 64 || !hex.as_bytes().iter().all(lower) {
            return None;
        }
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(hex.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Digest(digest))
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        text.strip_prefix("sha256:")
            .and_then(Digest::from_hex)
            .ok_or_else(|| DigestError(text.chars().take(200).collect()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// Computes a digest incrementally.
#[derive(Clone)]
pub struct Hasher(Context);

impl Default for Hasher {
    fn default() -> Self {
        Hasher(Context::new(&SHA256))
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hasher(…)")
    }
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Reads and hashes everything; returns also the number of bytes.
    pub fn read(reader: &mut impl Read) -> io::Result<(Hasher, u64)> {
        let (mut hasher, mut len, mut buffer) = (Hasher::default(), 0, vec![0; 256 << 10]);
        loop {
            match reader.read(&mut buffer)? {
                0 => return Ok((hasher, len)),
                n => {
                    hasher.update(&buffer[..n]);
                    len += n as u64;
                }
            }
        }
    }

    /// The digest of all added bytes.
    pub fn finish(self) -> Digest {
        Digest::from_sha256(&self.0.finish())
    }
}

/// A reader that counts and hashes the bytes it passes on.
#[derive(Debug)]
pub struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
    read: u64,
}

impl<R: Read> HashingReader<R> {
    /// Wraps a reader.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            hasher: Hasher::default(),
            read: 0,
        }
    }

    /// The number and the digest of the bytes read.
    pub fn finish(self) -> (u64, Digest) {
        (self.read, self.hasher.finish())
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        self.read += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_round_trips_as_text() {
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest, Digest::of(b""));
        assert_eq!(digest.to_string(), text);
    }

    #[test]
    fn malformed_digests_are_rejected() {
        for bad in [
            "",
            "sha256:",
            "sha256:ABC",
            "md5:e3b0c44298fc1c14",
            &format!("sha256:{}", "A".repeat(64)),
            &format!("sha256:{}", "a".repeat(63)),
            &format!("sha256:../{}", "a".repeat(61)),
            &format!("sha256:{}", "é".repeat(32)),
        ] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
