//! One session: copies input from the request body, and output to the response body.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use pod_protocol::streams::{FrameReader, FrameStream, StreamFrame, TtySize};
use tokio::sync::mpsc;

use super::stdin::SessionInput;

/// The session of a client with a command or a container.
pub struct ClientSession {
    /// Where the client's input goes, if anywhere.
    pub input: Option<SessionInput>,
    /// Frames for the client.
    pub frames: FrameStream,
    /// The terminal that the client's resizes apply to.
    pub terminal: Option<Rc<OwnedFd>>,
    /// If the client disconnects, the process goes on and its output is discarded. Otherwise its streams are closed,
    /// which hangs up a terminal.
    pub survives_disconnect: bool,
}

impl ClientSession {
    /// Runs the session in a task of its own. Returns the frames for the client; dropping them means that the client
    /// has disconnected.
    pub fn run(self, client_frames: FrameReader) -> FrameStream {
        let (sender, receiver) = mpsc::channel(1);
        tokio::task::spawn_local(copy_streams(self, client_frames, sender));
        stream::unfold(receiver, |mut receiver| async move {
            let frame = receiver.recv().await?;
            Some((frame, receiver))
        })
        .boxed_local()
    }
}

/// Copies the client's input and the process's output until the output has ended or the client disconnects.
async fn copy_streams(
    session: ClientSession,
    client_frames: FrameReader,
    client: mpsc::Sender<Bytes>,
) {
    let ClientSession {
        input,
        mut frames,
        terminal,
        survives_disconnect,
    } = session;
    let is_complete = {
        let copy_input = copy_input(client_frames, input, terminal);
        let copy_output = copy_output(&mut frames, &client);
        tokio::pin!(copy_input, copy_output);
        tokio::select! {
            is_complete = &mut copy_output => is_complete,
            () = &mut copy_input => copy_output.await,
        }
    };
    drop(client);
    if !is_complete && survives_disconnect {
        while frames.next().await.is_some() {}
    }
}

/// Sends all frames to the client; `false` if the client disconnected first.
async fn copy_output(frames: &mut FrameStream, client: &mpsc::Sender<Bytes>) -> bool {
    // Reserve first: output that cannot be sent yet should stay in the process's pipe.
    while let Ok(permit) = client.reserve().await {
        let frame = tokio::select! {
            biased;
            () = client.closed() => return false,
            frame = frames.next() => frame,
        };
        match frame {
            Some(frame) => permit.send(frame),
            None => return true,
        }
    }
    false
}

/// Applies the client's frames until the client closes its stream or disconnects.
async fn copy_input(
    mut client_frames: FrameReader,
    mut input: Option<SessionInput>,
    terminal: Option<Rc<OwnedFd>>,
) {
    loop {
        match client_frames.next().await {
            Ok(Some(StreamFrame::Stdin(bytes))) => {
                if let Some(open_input) = &mut input
                    && let Err(error) = open_input.write(&bytes).await
                {
                    // Discard further input. Resizes may still come.
                    tracing::trace!(%error, "process has closed its standard input");
                    input = None;
                }
            }
            Ok(Some(StreamFrame::StdinEnd)) => input = None,
            Ok(Some(StreamFrame::Resize(size))) => {
                if let Some(terminal) = &terminal
                    && let Err(error) = resize(terminal, size)
                {
                    tracing::debug!(%error, "cannot resize terminal");
                }
            }
            Ok(Some(other)) => {
                tracing::debug!(?other, "unexpected frame from client");
                return;
            }
            Ok(None) => return,
            Err(error) => {
                tracing::trace!(%error, "client disconnected");
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
