//! New sizes of a client's terminal: JSON objects, one after the other.

use serde_json::Value;
use tokio::sync::mpsc;

use crate::pod_source::TerminalSize;
use crate::streams::IncomingStream;

/// An object that is larger than this is none.
const MAX_OBJECT: usize = 4 * 1024;

/// Hands on the sizes that the client sends, until it sends something else.
pub(super) async fn forward(mut incoming: IncomingStream, sizes: mpsc::Sender<TerminalSize>) {
    let mut text = Vec::new();
    while let Some(bytes) = incoming.next().await {
        text.extend_from_slice(&bytes);
        let Some(read) = parse(&mut text) else {
            tracing::debug!("a client's resize stream is no JSON");
            return;
        };
        for size in read {
            if sizes.send(size).await.is_err() {
                return;
            }
        }
    }
}

/// Takes all whole objects off `text`; nothing if it can't become one.
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

/// What is missing is 0, as Go reads it.
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
    fn sizes_are_read_as_they_come() {
        let mut text = br#"{"Width":80,"Height":24}"#.to_vec();
        text.extend(b"\n{\"Width\":100,\"Hei");
        assert_eq!(parse(&mut text), Some(vec![size_of(80, 24)]));
        text.extend(b"ght\":50}");
        assert_eq!(parse(&mut text), Some(vec![size_of(100, 50)]));
        assert_eq!(parse(&mut text), Some(vec![]));
    }

    #[test]
    fn what_is_no_size_ends_it() {
        assert_eq!(parse(&mut b"hello".to_vec()), None);
        let mut endless = vec![b'['; MAX_OBJECT + 1];
        assert_eq!(parse(&mut endless), None);
        let mut strange = br#"{"Width":-1,"Height":99999}"#.to_vec();
        assert_eq!(parse(&mut strange), Some(vec![size_of(0, u16::MAX)]));
    }
}
