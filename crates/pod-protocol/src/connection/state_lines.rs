//! States on the wire: one line of JSON each. Only the newest matters.

use std::io;

use crate::PodState;

/// Limit of one state: some hundred containers with long messages.
const MAX_STATE_SIZE: usize = 8 * 1024 * 1024;

/// Decodes states, and skips those that are out of date already.
#[derive(Default)]
pub(super) struct StateLines {
    /// The newest complete line, unless it was taken.
    newest: Option<Vec<u8>>,
    /// The incomplete line after it.
    partial: Vec<u8>,
}

impl StateLines {
    /// Adds received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(last) = memchr::memrchr(b'\n', bytes) else {
            return self.append(bytes);
        };
        let whole = &bytes[..last];
        let line = match memchr::memrchr(b'\n', whole) {
            Some(before) => whole[before + 1..].to_vec(),
            None => {
                self.append(whole)?;
                std::mem::take(&mut self.partial)
            }
        };
        self.newest = Some(line);
        self.partial.clear();
        self.append(&bytes[last + 1..])
    }

    /// The newest state, unless it was taken already.
    pub(super) fn newest(&mut self) -> io::Result<Option<PodState>> {
        let Some(line) = self.newest.take() else {
            return Ok(None);
        };
        Ok(Some(serde_json::from_slice(&line)?))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.partial.len() + bytes.len() > MAX_STATE_SIZE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("pod state is longer than {MAX_STATE_SIZE} bytes"),
            ));
        }
        self.partial.extend_from_slice(bytes);
        Ok(())
    }
}

/// Encodes a state.
pub(super) fn encode_line(state: &PodState) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(state)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state(serial: usize) -> PodState {
        PodState {
            pod_ips: vec![serial.to_string()],
            ..PodState::default()
        }
    }

    proptest! {
        #[test]
        fn newest_state_is_decoded_from_any_chunks(count in 0..5_usize, chunk in 1..400_usize, greedy: bool) {
            let bytes: Vec<u8> = (0..count).flat_map(|serial| encode_line(&state(serial)).unwrap()).collect();
            let mut lines = StateLines::default();
            let mut seen = Vec::new();
            for chunk in bytes.chunks(chunk) {
                lines.push(chunk).unwrap();
                if greedy {
                    seen.extend(lines.newest().unwrap());
                }
            }
            seen.extend(lines.newest().unwrap());
            let serials: Vec<usize> = seen.iter().map(|state| state.pod_ips[0].parse().unwrap()).collect();
            prop_assert!(serials.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(serials.last().copied(), count.checked_sub(1));
        }

        #[test]
        fn random_bytes_do_not_panic(chunks: Vec<Vec<u8>>) {
            let mut lines = StateLines::default();
            for chunk in chunks {
                let _ = lines.push(&chunk);
                let _ = lines.newest();
            }
        }
    }
}
