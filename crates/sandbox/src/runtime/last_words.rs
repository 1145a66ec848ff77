//! What a container leaves as its termination message.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Of a longer message its end is what counts, as upstream.
const AT_MOST: u64 = 4096;

/// The end of what a container has written to its message's file.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(AT_MOST)))?;
    let mut bytes = Vec::new();
    file.take(AT_MOST).read_to_end(&mut bytes)?;
    // The first character may have been cut in two.
    let continues = |byte: &&u8| length > AT_MOST && (**byte & 0b1100_0000) == 0b1000_0000;
    let cut = bytes.iter().take(3).take_while(continues).count();
    Ok(String::from_utf8_lossy(&bytes[cut..]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_message_the_end_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("message");
        for (written, want) in [
            ("short".to_owned(), "short".to_owned()),
            (
                format!("{}end", "x".repeat(5000)),
                format!("{}end", "x".repeat(4093)),
            ),
            (format!("a{}", "ä".repeat(2500)), "ä".repeat(2048)),
            (
                format!("{}b", "ä".repeat(2500)),
                format!("{}b", "ä".repeat(2047)),
            ),
            (String::new(), String::new()),
        ] {
            std::fs::write(&path, written).unwrap();
            assert_eq!(read(&path).unwrap(), want);
        }
        assert!(read(&dir.path().join("none")).is_err());
    }
}
