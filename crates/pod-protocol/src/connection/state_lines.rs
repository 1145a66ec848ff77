//! States on the wire: one line of JSON each, of which only the newest matters.

use std::io;

use crate::PodState;

/// How long one state may be: some hundred containers with long messages.
const LONGEST: usize = 8 * 1024 * 1024;

/// Turns bytes into states, leaving out those that are already out of date.
#[derive(Default)]
pub(super) struct StateLines {
    /// The newest whole line, unless it was taken.
    newest: Option<Vec<u8>>,
    /// The beginning of the next.
    begun: Vec<u8>,
}

impl StateLines {
    /// Takes in what has come.
    pub(super) fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(last) = memchr::memrchr(b'\n', bytes) else {
            return self.begin(bytes);
        };
        let whole = &bytes[..last];
        let line = match memchr::memrchr(b'\n', whole) {
            Some(before) => whole[before + 1..].to_vec(),
            None => {
                self.begin(whole)?;
                std::mem::take(&mut self.begun)
            }
        };
        self.newest = Some(line);
        self.begun.clear();
        self.begin(&bytes[last + 1..])
    }

    /// The newest state that has come, once.
    pub(super) fn newest(&mut self) -> io::Result<Option<PodState>> {
        let Some(line) = self.newest.take() else {
            return Ok(None);
        };
        Ok(Some(serde_json::from_slice(&line)?))
    }

    fn begin(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.begun.len() + bytes.len() > LONGEST {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a state of more than {LONGEST} bytes"),
            ));
        }
        self.begun.extend_from_slice(bytes);
        Ok(())
    }
}

/// A state as it goes over the wire.
pub(super) fn line(state: &PodState) -> serde_json::Result<Vec<u8>> {
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
        fn the_newest_state_is_seen_however_it_comes(count in 0..5_usize, chunk in 1..400_usize, greedy: bool) {
            let bytes: Vec<u8> = (0..count).flat_map(|serial| line(&state(serial)).unwrap()).collect();
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
        fn garbage_is_an_error_at_most(chunks: Vec<Vec<u8>>) {
            let mut lines = StateLines::default();
            for chunk in chunks {
                let _ = lines.push(&chunk);
                let _ = lines.newest();
            }
        }
    }
}
