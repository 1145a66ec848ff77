//! The output and exit code of an exec session, as frames for its client.

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use linux::async_fd::OutputReader;
use pod_protocol::streams::{FrameKind, FrameStream, STREAM_BLOCK_SIZE, SessionEnd, fill_frame};
use rustix::process::Signal;
use tokio::io::AsyncReadExt;
use tokio::sync::{oneshot, watch};

use super::inner::message::ProcessExit;

/// Background processes of a command may keep its streams open after it has exited. The command's own output is in the pipes by
/// then, so the session ends after this much silence.
const OUTPUT_IDLE_TIMEOUT: Duration = Duration::from_millis(100);

/// A running command.
pub struct ExecStream {
    /// Its standard output, or its terminal; `None` at end-of-file.
    pub stdout: Option<ExecOutput>,
    /// Its standard error, if it has no terminal; `None` at end-of-file.
    pub stderr: Option<ExecOutput>,
    /// Its pidfd.
    pub process: OwnedFd,
    /// Receives its exit.
    pub exit: oneshot::Receiver<ProcessExit>,
    /// Closed when the container exits. In a shared pid namespace the kernel does not kill the command then.
    pub container: watch::Receiver<()>,
}

/// One output stream of a command.
pub struct ExecOutput {
    /// The stream.
    pub reader: OutputReader,
    /// The client has requested it; otherwise it is read and discarded.
    pub wanted: bool,
}

impl ExecStream {
    /// All output, then the exit code.
    pub fn frames(self) -> FrameStream {
        let state = State {
            command: self,
            exit: None,
            stderr_first: false,
            container_exited: false,
        };
        stream::unfold(Some(state), |state| async move {
            let mut state = state?;
            match state.next().await {
                Next::Frame(frame) => Some((frame, Some(state))),
                Next::Exited(exit) => Some((SessionEnd::Code(exit.code).to_frame(), None)),
            }
        })
        .boxed_local()
    }
}

struct State {
    command: ExecStream,
    exit: Option<ProcessExit>,
    /// Read standard error first: the streams take turns.
    stderr_first: bool,
    container_exited: bool,
}

enum Next {
    Frame(Bytes),
    Exited(ProcessExit),
}

impl State {
    async fn next(&mut self) -> Next {
        loop {
            let Self {
                command,
                exit,
                stderr_first,
                container_exited,
            } = self;
            let ExecStream {
                stdout,
                stderr,
                process,
                exit: exited,
                container,
            } = command;
            if let Some(exit) = exit
                && stdout.is_none()
                && stderr.is_none()
            {
                return Next::Exited(*exit);
            }
            *stderr_first = !*stderr_first;
            let reading = std::future::poll_fn(|context| {
                let (first, second) = if *stderr_first {
                    (
                        (&mut *stderr, FrameKind::Stderr),
                        (&mut *stdout, FrameKind::Stdout),
                    )
                } else {
                    (
                        (&mut *stdout, FrameKind::Stdout),
                        (&mut *stderr, FrameKind::Stderr),
                    )
                };
                match poll_read(first.0, first.1, context) {
                    Poll::Pending => poll_read(second.0, second.1, context),
                    ready => ready,
                }
            });
            tokio::select! {
                biased;
                frame = reading => if let Some(frame) = frame {
                    return Next::Frame(frame);
                },
                exited = exited, if exit.is_none() => {
                    *exit = Some(exited.unwrap_or(ProcessExit::SIGKILL));
                }
                _ = container.changed(), if !*container_exited => {
                    *container_exited = true;
                    // Already exited: ignore.
                    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
                }
                () = tokio::time::sleep(OUTPUT_IDLE_TIMEOUT), if exit.is_some() => {
                    (*stdout, *stderr) = (None, None);
                }
            }
        }
    }
}

/// Reads available bytes into a frame; `None` if the client has not requested the stream, or at end-of-file.
fn poll_read(
    output: &mut Option<ExecOutput>,
    kind: FrameKind,
    context: &mut Context<'_>,
) -> Poll<Option<Bytes>> {
    let Some(ExecOutput { reader, wanted }) = output else {
        return Poll::Pending;
    };
    // Allocated for each read, so that an idle command needs no memory.
    let (read, frame) = fill_frame(kind, STREAM_BLOCK_SIZE, |block| {
        pin!(reader.read_buf(block)).poll(context)
    });
    match read {
        Poll::Pending => Poll::Pending,
        Poll::Ready(Ok(read)) if read > 0 => Poll::Ready(frame.filter(|_| *wanted)),
        Poll::Ready(_) => {
            *output = None;
            Poll::Ready(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use linux::async_fd::InputWriter;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use pod_protocol::streams::{FrameDecoder, StreamFrame};

    use super::super::stdio::StdioPipes;
    use super::*;

    /// A process of the host instead of one in a container.
    struct TestCommand {
        stream: ExecStream,
        stdin: Option<InputWriter>,
        container: watch::Sender<()>,
    }

    fn start(script: &str) -> TestCommand {
        let pipes = StdioPipes::new(false, true).unwrap();
        let theirs = pipes.theirs();
        let stdio = |at: usize| Stdio::from(theirs[at].try_clone_to_owned().unwrap());
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(stdio(0))
            .stdout(stdio(1))
            .stderr(stdio(2))
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let (sender, exit) = oneshot::channel();
        std::thread::spawn(move || {
            use std::os::unix::process::ExitStatusExt;
            let status = child.wait().unwrap();
            let signal = status.signal();
            let code = status.code().unwrap_or(128 + signal.unwrap_or(0));
            let _ = sender.send(ProcessExit { code, signal });
        });
        let streams = pipes.open(None, true).unwrap();
        let output = |reader| ExecOutput {
            reader,
            wanted: true,
        };
        let container = watch::Sender::new(());
        TestCommand {
            stream: ExecStream {
                stdout: streams.stdout.map(output),
                stderr: streams.stderr.map(output),
                process,
                exit,
                container: container.subscribe(),
            },
            stdin: streams.stdin,
            container,
        }
    }

    async fn collect(mut frames: FrameStream) -> (String, String, Option<SessionEnd>) {
        let mut decoder = FrameDecoder::default();
        let (mut output, mut errors, mut end) = (Vec::new(), Vec::new(), None);
        while let Some(frame) = frames.next().await {
            decoder.push(frame);
            while let Some(frame) = decoder.take().unwrap() {
                match frame {
                    StreamFrame::Stdout(bytes) => output.extend_from_slice(&bytes),
                    StreamFrame::Stderr(bytes) => errors.extend_from_slice(&bytes),
                    StreamFrame::Exit(session_end) => end = Some(session_end),
                    other => panic!("{other:?}"),
                }
            }
        }
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(output), text(errors), end)
    }

    #[tokio::test]
    async fn exec_returns_output_and_exit_code() {
        let mut command = start("cat; echo bad >&2; exit 3");
        let stdin = command.stdin.take().unwrap();
        stdin.write_all(b"good").await.unwrap();
        drop(stdin);
        let (output, errors, end) = collect(command.stream.frames()).await;
        assert_eq!((&*output, &*errors), ("good", "bad\n"));
        assert_eq!(end, Some(SessionEnd::Code(3)));
        let killed = start("kill -TERM $$");
        assert_eq!(
            collect(killed.stream.frames()).await.2,
            Some(SessionEnd::Code(143))
        );
    }

    #[tokio::test]
    async fn output_before_exit_is_complete() {
        let command = start("head -c 3000000 /dev/zero | tr '\\0' x");
        let mut frames = command.stream.frames();
        // Long enough for the command to fill the pipe.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut length = 0;
        while let Some(frame) = frames.next().await {
            length += frame.len();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(length > 3_000_000);
    }

    #[tokio::test]
    async fn background_process_does_not_delay_exit() {
        let command = start("sleep 20 & echo done");
        let before = Instant::now();
        let (output, _, end) = collect(command.stream.frames()).await;
        assert_eq!((&*output, end), ("done\n", Some(SessionEnd::Code(0))));
        assert!(before.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn command_is_killed_with_its_container() {
        let command = start("sleep 20");
        drop(command.container);
        let (_, _, end) = collect(command.stream.frames()).await;
        assert_eq!(end, Some(SessionEnd::Code(137)));
    }
}
