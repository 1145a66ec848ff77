//! The record layer of TLS 1.3 (RFC 8446, section 5), on buffers that the caller owns.
//!
//! rustls does the handshake and hands over the traffic keys. Then records are sealed and opened here, in place: packets are
//! read from the TUN device between the gaps for record headers and tags, and written to it from between them. So a packet is
//! copied only by the kernel. rustls's own record layer copies each packet three times.

use std::ops::Range;

use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets;

/// The length of a record's header.
pub(super) const HEADER: usize = 5;
/// The length of what follows the content of a record: its type, and the tag of the AEAD.
pub(super) const TRAILER: usize = 1 + TAG;
const TAG: usize = 16;
/// The maximum length of a record's content.
pub(super) const MAX_CONTENT: usize = 1 << 14;
/// The length of a full record.
pub(super) const MAX_RECORD: usize = HEADER + MAX_CONTENT + TRAILER;
/// A key protects fewer records than this; RFC 8446 allows 24 million full ones with AES-GCM.
const MAX_RECORDS: u64 = 1 << 23;

/// The outer type of every record, and the inner type of those with content.
const APPLICATION_DATA: u8 = 23;
/// TLS 1.2, which all records of TLS 1.3 claim.
const VERSION: [u8; 2] = [3, 3];

/// Why a connection can't go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    /// The cipher suite is not supported.
    #[error("unsupported cipher suite")]
    Suite,
    /// A record has no valid header.
    #[error("malformed TLS record")]
    Malformed,
    /// A record was changed or forged.
    #[error("TLS record cannot be decrypted")]
    Decrypt,
    /// The peer closed the connection, or sent a message that is not expected after the handshake.
    #[error("peer ended the TLS session")]
    Ended,
    /// The key has protected as many records as it may.
    #[error("TLS key is used up")]
    KeyUsedUp,
}

/// The key of one direction.
struct TrafficKey {
    key: LessSafeKey,
    iv: [u8; 12],
    /// The number of the next record.
    sequence: u64,
}

impl TrafficKey {
    fn new(sequence: u64, secrets: &ConnectionTrafficSecrets) -> Result<Self, RecordError> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&aead::AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&aead::AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
                (&aead::CHACHA20_POLY1305, key, iv)
            }
            _ => return Err(RecordError::Suite),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| RecordError::Suite)?;
        let iv = iv.as_ref().try_into().map_err(|_| RecordError::Suite)?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv,
            sequence,
        })
    }

    /// The nonce of the next record: its number, masked by the IV.
    fn next_nonce(&mut self) -> Result<Nonce, RecordError> {
        if self.sequence >= MAX_RECORDS {
            return Err(RecordError::KeyUsedUp);
        }
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// Seals records.
pub(super) struct Sealer(TrafficKey);

impl Sealer {
    pub(super) fn new(
        (sequence, secrets): &(u64, ConnectionTrafficSecrets),
    ) -> Result<Self, RecordError> {
        TrafficKey::new(*sequence, secrets).map(Self)
    }

    /// Seals the content of length `length` that begins at [`HEADER`] in `buffer`, which must have room for the [`TRAILER`].
    /// Returns the length of the record.
    pub(super) fn seal(&mut self, buffer: &mut [u8], length: usize) -> Result<usize, RecordError> {
        let record = HEADER + length + TRAILER;
        let (header, body) = buffer
            .get_mut(..record)
            .and_then(|record| record.split_first_chunk_mut::<HEADER>())
            .ok_or(RecordError::Malformed)?;
        *header = encode_header(length + TRAILER);
        let (content, tag) = body.split_at_mut(length + 1);
        content[length] = APPLICATION_DATA;
        let nonce = self.0.next_nonce()?;
        let sealed = self
            .0
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(*header), content)
            .map_err(|_| RecordError::Malformed)?;
        tag.copy_from_slice(sealed.as_ref());
        Ok(record)
    }
}

/// Opens records.
pub(super) struct Opener(TrafficKey);

/// A record that was opened in place.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OpenedRecord {
    /// Where its content is in the buffer.
    pub content: Range<usize>,
    /// The length of the whole record.
    pub length: usize,
}

impl Opener {
    pub(super) fn new(
        (sequence, secrets): &(u64, ConnectionTrafficSecrets),
    ) -> Result<Self, RecordError> {
        TrafficKey::new(*sequence, secrets).map(Self)
    }

    /// Opens the record at the beginning of `buffer`; `None` if it is not complete.
    pub(super) fn open(&mut self, buffer: &mut [u8]) -> Result<Option<OpenedRecord>, RecordError> {
        let Some((header, rest)) = buffer.split_first_chunk_mut::<HEADER>() else {
            return Ok(None);
        };
        let length = decode_header(*header)?;
        let Some(body) = rest.get_mut(..length) else {
            return Ok(None);
        };
        let nonce = self.0.next_nonce()?;
        let opened = self
            .0
            .key
            .open_in_place(nonce, Aad::from(*header), body)
            .map_err(|_| RecordError::Decrypt)?;
        // The content is followed by its type, and the type by padding of zeros.
        let end = opened
            .iter()
            .rposition(|byte| *byte != 0)
            .ok_or(RecordError::Malformed)?;
        if opened[end] != APPLICATION_DATA {
            return Err(RecordError::Ended);
        }
        Ok(Some(OpenedRecord {
            content: HEADER..HEADER + end,
            length: HEADER + length,
        }))
    }
}

fn encode_header(length: usize) -> [u8; HEADER] {
    // A record is at most 16 KiB and a bit long.
    let [high, low] = (length as u16).to_be_bytes();
    [APPLICATION_DATA, VERSION[0], VERSION[1], high, low]
}

/// The length of what follows the header.
fn decode_header(header: [u8; HEADER]) -> Result<usize, RecordError> {
    let [kind, major, minor, high, low] = header;
    let length = usize::from(u16::from_be_bytes([high, low]));
    // RFC 8446 allows 255 bytes of expansion.
    let is_valid = kind == APPLICATION_DATA
        && [major, minor] == VERSION
        && (TRAILER..=MAX_CONTENT + 256).contains(&length);
    is_valid.then_some(length).ok_or(RecordError::Malformed)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    /// The two ends of one direction.
    pub fn pair() -> (Sealer, Opener) {
        let secrets = || {
            let secrets = ConnectionTrafficSecrets::Aes128Gcm {
                key: AeadKey::from([7; 32]),
                iv: Iv::from([9; 12]),
            };
            (0, secrets)
        };
        (
            Sealer::new(&secrets()).unwrap(),
            Opener::new(&secrets()).unwrap(),
        )
    }

    proptest! {
        #[test]
        fn sealed_records_are_opened(contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..2000), 1..5)) {
            let (mut sealer, mut opener) = pair();
            for content in contents {
                let mut buffer = vec![0; HEADER + content.len() + TRAILER + 3];
                buffer[HEADER..HEADER + content.len()].copy_from_slice(&content);
                let length = sealer.seal(&mut buffer, content.len()).unwrap();
                prop_assert_eq!(length, HEADER + content.len() + TRAILER);
                prop_assert_eq!(opener.open(&mut buffer[..length - 1]).unwrap(), None);
                let opened = opener.open(&mut buffer).unwrap().unwrap();
                prop_assert_eq!(opened.length, length);
                prop_assert_eq!(&buffer[opened.content], &content[..]);
            }
        }

        #[test]
        fn changed_records_are_rejected(at in 0..60_usize, bit in 0..8_u32) {
            let (mut sealer, mut opener) = pair();
            let mut buffer = vec![1; HEADER + 40 + TRAILER];
            sealer.seal(&mut buffer, 40).unwrap();
            buffer[at] ^= 1 << bit;
            let opened = opener.open(&mut buffer);
            prop_assert!(!matches!(opened, Ok(Some(_))), "{:?}", opened);
        }

        #[test]
        fn random_bytes_do_not_panic(mut bytes: Vec<u8>) {
            let _ = pair().1.open(&mut bytes);
        }
    }

    #[test]
    fn repeated_record_is_rejected() {
        let (mut sealer, mut opener) = pair();
        let mut buffer = vec![0; HEADER + 1 + TRAILER];
        sealer.seal(&mut buffer, 1).unwrap();
        let copy = buffer.clone();
        assert!(opener.open(&mut buffer).unwrap().is_some());
        let mut again = copy;
        assert!(matches!(opener.open(&mut again), Err(RecordError::Decrypt)));
    }
}
