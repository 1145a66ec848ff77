//! One session: input from a request's body, frames into an answer's.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use pod_protocol::streams::{FrameReader, FrameStream, StreamFrame, TtySize};
use tokio::sync::mpsc;

use super::input::Input;

/// A process or container, as a client is connected to it.
pub struct Session {
    /// Where the client's input goes.
    pub input: Option<Input>,
    /// What the client is told.
    pub frames: FrameStream,
    /// The terminal that gets the client's size.
    pub terminal: Option<Rc<OwnedFd>>,
    /// A client that vanishes leaves the process as it is, and what it writes is thrown away. Otherwise everything is closed,
    /// which is what a terminal calls hanging up.
    pub lingers: bool,
}

impl Session {
    /// Runs to the session's end, and passes on what the client sends. Returns the frames for the client; dropping them
    /// means that the client is gone.
    pub fn run(self, client: FrameReader) -> FrameStream {
        let (tell, told) = mpsc::channel(1);
        tokio::task::spawn_local(converse(self, client, tell));
        stream::unfold(told, |mut told| async move {
            let frame = told.recv().await?;
            Some((frame, told))
        })
        .boxed_local()
    }
}

async fn converse(session: Session, words: FrameReader, tell: mpsc::Sender<Bytes>) {
    let Session {
        input,
        mut frames,
        terminal,
        lingers,
    } = session;
    let told_all = {
        let feeding = feed(words, input, terminal);
        let telling = say(&mut frames, &tell);
        tokio::pin!(feeding, telling);
        tokio::select! {
            told_all = &mut telling => told_all,
            () = &mut feeding => telling.await,
        }
    };
    drop(tell);
    if !told_all && lingers {
        while frames.next().await.is_some() {}
    }
}

/// Tells everything; `false` if the client was gone first.
async fn say(frames: &mut FrameStream, tell: &mpsc::Sender<Bytes>) -> bool {
    // Room first: what can't be told yet is better left in the process's pipe.
    while let Ok(room) = tell.reserve().await {
        let frame = tokio::select! {
            biased;
            () = tell.closed() => return false,
            frame = frames.next() => frame,
        };
        match frame {
            Some(frame) => room.send(frame),
            None => return true,
        }
    }
    false
}

/// Passes on what the client says, until it has said all or is gone.
async fn feed(mut words: FrameReader, mut input: Option<Input>, terminal: Option<Rc<OwnedFd>>) {
    loop {
        match words.next().await {
            Ok(Some(StreamFrame::Stdin(bytes))) => {
                if let Some(open) = &mut input
                    && let Err(error) = open.write(&bytes).await
                {
                    // As with a pipe whose reader has ended. Sizes may still come.
                    tracing::trace!(%error, "a process reads no more");
                    input = None;
                }
            }
            Ok(Some(StreamFrame::StdinEnd)) => input = None,
            Ok(Some(StreamFrame::Resize(size))) => {
                if let Some(terminal) = &terminal
                    && let Err(error) = resize(terminal, size)
                {
                    tracing::debug!(%error, "a terminal keeps its size");
                }
            }
            Ok(Some(other)) => {
                tracing::debug!(?other, "a client says what only a pod says");
                return;
            }
            Ok(None) => return,
            Err(error) => {
                tracing::trace!(%error, "a client is gone");
                return;
            }
        }
    }
}

fn resize(terminal: &OwnedFd, size: TtySize) -> io::Result<()> {
    let size = rustix::termios::Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}
