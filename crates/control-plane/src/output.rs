//! Reads a component's output line by line.

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;

/// Longer lines are split, to bound memory.
const MAX_OUTPUT_LINE: usize = 16 * 1024;

/// Sends each line of `source` to `lines` until the end of the file.
pub(crate) async fn forward_lines(
    source: Option<impl AsyncRead + Unpin>,
    lines: mpsc::Sender<Vec<u8>>,
) {
    let Some(mut source) = source else { return };
    let mut pending = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(count) = source.read(&mut chunk).await {
        if count == 0 {
            break;
        }
        for byte in &chunk[..count] {
            if *byte != b'\n' {
                pending.push(*byte);
            }
            if (*byte == b'\n' || pending.len() >= MAX_OUTPUT_LINE)
                && lines.send(std::mem::take(&mut pending)).await.is_err()
            {
                return;
            }
        }
    }
    if !pending.is_empty() {
        let _ = lines.send(pending).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines_of(text: &[u8]) -> Vec<Vec<u8>> {
        let (sender, mut receiver) = mpsc::channel(1000);
        forward_lines(Some(text), sender).await;
        let mut lines = Vec::new();
        while let Some(line) = receiver.recv().await {
            lines.push(line);
        }
        lines
    }

    #[tokio::test]
    async fn output_is_split_into_bounded_lines() {
        assert_eq!(
            lines_of(b"a\n\nb").await,
            [b"a".to_vec(), vec![], b"b".to_vec()]
        );
        let long = lines_of(&vec![b'x'; MAX_OUTPUT_LINE + 1]).await;
        assert_eq!(
            long.iter().map(Vec::len).collect::<Vec<_>>(),
            [MAX_OUTPUT_LINE, 1]
        );
    }
}
