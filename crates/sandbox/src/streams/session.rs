//! One session: input from the request body, frames into the response body.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use pod_protocol::streams::{FrameReader, FrameStream, StreamFrame, TtySize};
use tokio::sync::mpsc;

use super::input::Input;

/// The connection of a client to a process or container.
pub struct Session {
    /// Destination of the client's input.
    pub input: Option<Input>,
    /// Frames for the client.
    pub frames: FrameStream,
    /// The terminal that the client's resizes apply to.
    pub terminal: Option<Rc<OwnedFd>>,
    /// If the client disconnects, the process goes on and its output is discarded. Otherwise everything is closed,
    /// which hangs up a terminal.
    pub lingers: bool,
}

impl Session {
    /// Runs the session in a task of its own. Returns the frames for the client; dropping them means that the client
    /// has disconnected.
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

/// Sends all frames; `false` if the client disconnected first.
async fn say(frames: &mut FrameStream, tell: &mpsc::Sender<Bytes>) -> bool {
    // Reserve first: output that can't be sent yet should stay in the process's pipe.
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

/// Passes on the client's frames until the client closes its stream or disconnects.
async fn feed(mut words: FrameReader, mut input: Option<Input>, terminal: Option<Rc<OwnedFd>>) {
    loop {
        match words.next().await {
            Ok(Some(StreamFrame::Stdin(bytes))) => {
                if let Some(open) = &mut input
                    && let Err(error) = open.write(&bytes).await
                {
                    // The process has closed its stdin: discard further input. Resizes may still come.
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
