//! Streams into a pod: frames of exec and attach, bytes of port-forward.
//!
//! Each session is one HTTP/2 stream. `frames.rs` multiplexes the channels of a session over it, without IO;
//! `frame_reader.rs` reads frames from an HTTP/2 body; `forward.rs` copies the bytes of a forwarded port unframed.
//! Nothing is read before there is room for it: HTTP/2's flow control blocks a process whose output the client does
//! not read, and a client whose input the process does not read.

mod forward;
mod frame_reader;
mod frames;

use bytes::Bytes;
use futures::stream::LocalBoxStream;
use futures::{Stream, StreamExt};

pub(crate) use forward::forward;
pub use frame_reader::FrameReader;
pub use frames::{
    FrameDecoder, FrameError, FrameKind, SessionEnd, StreamFrame, TtySize, encode_frame, fill_frame,
};

/// The encoded frames that a session sends to its client; the last one is [`FrameKind::Exit`].
pub type FrameStream = LocalBoxStream<'static, Bytes>;

/// Size of the buffers that streams are read into, and so the largest payload of a frame of output.
pub const STREAM_BLOCK_SIZE: usize = 64 * 1024;

/// Removes the first `count` bytes of a stream.
pub fn skip_bytes<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    count: u64,
) -> impl Stream<Item = Result<Bytes, E>> {
    let mut left = count;
    stream
        .map(move |item| {
            let mut bytes = item?;
            let skipped = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            left -= skipped as u64;
            Ok(bytes.split_off(skipped))
        })
        .filter(|item| std::future::ready(!item.as_ref().is_ok_and(Bytes::is_empty)))
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;

    #[tokio::test]
    async fn bytes_are_skipped_across_chunks() {
        let rest = async |count| -> Vec<u8> {
            let chunks = ["one", "two"].map(|text| Ok::<_, ()>(Bytes::from(text)));
            let rest = skip_bytes(futures::stream::iter(chunks), count);
            rest.try_collect::<Vec<_>>().await.unwrap().concat()
        };
        assert_eq!(rest(0).await, b"onetwo");
        assert_eq!(rest(2).await, b"etwo");
        assert_eq!(rest(4).await, b"wo");
        assert_eq!(rest(6).await, b"");
        assert_eq!(rest(7).await, b"");
    }
}
