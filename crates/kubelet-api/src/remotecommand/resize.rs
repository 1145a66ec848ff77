//! The resize stream: a sequence of JSON objects with the size of the client's terminal.

use serde_json::Value;
use tokio::sync::mpsc;

use crate::pod_source::TerminalSize;
use crate::streams::IncomingStream;

/// Limit for one object, in bytes.
const MAX_OBJECT: usize = 4 * 1024;

/// Forwards terminal sizes until the stream ends or contains something else.
pub(super) async fn forward(mut incoming: IncomingStream, sizes: mpsc::Sender<TerminalSize>) {
    let mut text = Vec::new();
    while let Some(bytes) = incoming.next().await {
        text.extend_from_slice(&bytes);
        let Some(parsed) = parse(&mut text) else {
            tracing::debug!("invalid JSON on resize stream");
            return;
        };
        for size in parsed {
            if sizes.send(size).await.is_err() {
                return;
            }
        }
    }
}

/// Removes all complete objects from `text`. `None` if the text is invalid.
fn parse(text: &mut Vec<u8>) -> Option<Vec<TerminalSize>> {
    let mut objects = serde_json::Deserializer::from_slice(text).into_iter::<Value>();
    let mut sizes = Vec::new();
    let mut end = 0;
    while let Some(object) = objects.next() {
        match object {
            Ok(object) => sizes.push(size(&object)),
            Err(error) if error.is_eof() => break,
            Err(_) => return None,
        }
        end = objects.byte_offset();
    }
    text.drain(..end);
    (text.len() <= MAX_OBJECT).then_some(sizes)
}

/// A missing field is 0, as in Go.
fn size(object: &Value) -> TerminalSize {
    let number = |name: &str| {
        let number = object[name].as_u64().unwrap_or_default();
        u16::try_from(number).unwrap_or(u16::MAX)
    };
    TerminalSize {
        columns: number("Width"),
        rows: number("Height"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of(columns: u16, rows: u16) -> TerminalSize {
        TerminalSize { columns, rows }
    }

    #[test]
    fn sizes_are_parsed_incrementally() {
        let mut text = br#"{"Width":80,"Height":24}"#.to_vec();
        text.extend(b"\n{\"Width\":100,\"Hei");
        assert_eq!(parse(&mut text), Some(vec![size_of(80, 24)]));
        text.extend(b"ght\":50}");
        assert_eq!(parse(&mut text), Some(vec![size_of(100, 50)]));
        assert_eq!(parse(&mut text), Some(vec![]));
    }

    #[test]
    fn invalid_or_endless_text_ends_the_stream() {
        assert_eq!(parse(&mut b"hello".to_vec()), None);
        let mut endless = vec![b'['; MAX_OBJECT + 1];
        assert_eq!(parse(&mut endless), None);
        let mut strange = br#"{"Width":-1,"Height":99999}"#.to_vec();
        assert_eq!(parse(&mut strange), Some(vec![size_of(0, u16::MAX)]));
    }
}
