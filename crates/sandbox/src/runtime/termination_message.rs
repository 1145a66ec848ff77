//! A container's termination message (`terminationMessagePath`, `terminationMessagePolicy`).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::{LinuxRuntime, cleanup};
use crate::container_runtime::StartRequest;
use crate::node_services::NodeServices;

/// The message is the end of the file, at most this many bytes. As upstream.
const MAX_MESSAGE_BYTES: u64 = 4096;
/// The fallback is the end of the log, at most this many lines and bytes. As upstream.
const MAX_LOG_LINES: u64 = 80;
const MAX_LOG_BYTES: usize = 2048;

impl<S: NodeServices> LinuxRuntime<S> {
    /// Reads the message of a container that has exited, then removes the container's files.
    pub(super) async fn read_termination_message(
        &self,
        request: &StartRequest,
        failed: bool,
    ) -> Option<String> {
        let dir = self.container_dir(request);
        let message = read_end(&dir.join("termination-log")).unwrap_or_default();
        tokio::task::spawn_local(cleanup::remove_dir(dir));
        let policy = request.container.termination_message_policy.as_deref();
        if message.is_empty() && failed && policy == Some("FallbackToLogsOnError") {
            let name = &request.container.name;
            let log = self
                .logs
                .tail_text(name, request.attempt, MAX_LOG_LINES, MAX_LOG_BYTES);
            return Some(log.await);
        }
        (!message.is_empty()).then_some(message)
    }
}

fn read_end(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MAX_MESSAGE_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(MAX_MESSAGE_BYTES).read_to_end(&mut bytes)?;
    // The cut may be in the middle of a UTF-8 character.
    let is_continuation =
        |byte: &&u8| length > MAX_MESSAGE_BYTES && (**byte & 0b1100_0000) == 0b1000_0000;
    let cut = bytes.iter().take(3).take_while(is_continuation).count();
    Ok(String::from_utf8_lossy(&bytes[cut..]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_message_is_truncated_at_its_start() {
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
            assert_eq!(read_end(&path).unwrap(), want);
        }
        assert!(read_end(&dir.path().join("none")).is_err());
    }
}
