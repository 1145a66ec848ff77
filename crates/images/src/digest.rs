//! SHA-256 digests, the names of everything in an image.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A digest as it is written in manifests: `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// What should be a digest is something else.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0:?} is not a digest: sha256: and 64 hexadecimal digits are expected")]
pub struct DigestError(String);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    /// The hexadecimal digits alone, as they name a file.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads 64 hexadecimal digits.
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

/// A digest in the making.
#[derive(Debug, Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all that was added.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// Passes bytes on, and knows their number and digest.
#[derive(Debug)]
pub struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
    read: u64,
}

impl<R: Read> HashingReader<R> {
    /// Nothing has been read yet.
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            hasher: Hasher::default(),
            read: 0,
        }
    }

    /// The number and the digest of the bytes that were read.
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
    fn text_and_back() {
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest, Digest::of(b""));
        assert_eq!(digest.to_string(), text);
    }

    #[test]
    fn what_is_none() {
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
