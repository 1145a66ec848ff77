//! What a command in a container says, and how it ends, as frames for the client that runs it.

use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use rustix::process::Signal;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{oneshot, watch};

use super::inside::End;
use pod_protocol::streams::{BLOCK, Ending, Frames, Kind, frame};

/// A command that has ended may have left others behind which hold its streams and say nothing. What it said itself is in
/// the pipe by then, so that a silence of this length is the end.
const SILENCE: Duration = Duration::from_millis(100);

/// A running command.
pub struct ProcessOutput {
    /// Its outputs; none once they have ended.
    pub output: Option<Source>,
    /// The second, if there is no terminal.
    pub errors: Option<Source>,
    /// The process.
    pub process: OwnedFd,
    /// Tells of its end.
    pub end: oneshot::Receiver<End>,
    /// Closed with the container. Where processes are shared, the kernel does not end what runs in it.
    pub container: watch::Receiver<()>,
}

/// One output.
pub struct Source {
    /// Where it comes from.
    pub from: Pin<Box<dyn AsyncRead>>,
    /// Its client wants it; otherwise it is read and thrown away.
    pub wanted: bool,
}

impl ProcessOutput {
    /// Everything it says, and at last how it ended.
    pub fn frames(self) -> Frames {
        let state = State {
            command: self,
            code: None,
            errors_first: false,
            container_gone: false,
        };
        stream::unfold(Some(state), |state| async move {
            let mut state = state?;
            match state.next().await {
                Said::Frame(frame) => Some((frame, Some(state))),
                Said::Ended(ending) => Some((ending.frame(), None)),
            }
        })
        .boxed_local()
    }
}

struct State {
    command: ProcessOutput,
    /// Once it has ended.
    code: Option<i32>,
    /// Whose turn it is.
    errors_first: bool,
    container_gone: bool,
}

enum Said {
    Frame(Bytes),
    Ended(Ending),
}

impl State {
    async fn next(&mut self) -> Said {
        loop {
            let Self {
                command,
                code,
                errors_first,
                container_gone,
            } = self;
            let ProcessOutput {
                output,
                errors,
                process,
                end,
                container,
            } = command;
            if let Some(code) = code
                && output.is_none()
                && errors.is_none()
            {
                return Said::Ended(Ending::Code(*code));
            }
            *errors_first = !*errors_first;
            let reading = std::future::poll_fn(|context| {
                let (first, second) = if *errors_first {
                    ((&mut *errors, Kind::Errors), (&mut *output, Kind::Output))
                } else {
                    ((&mut *output, Kind::Output), (&mut *errors, Kind::Errors))
                };
                match poll_read(first.0, first.1, context) {
                    Poll::Pending => poll_read(second.0, second.1, context),
                    ready => ready,
                }
            });
            tokio::select! {
                biased;
                frame = reading => if let Some(frame) = frame {
                    return Said::Frame(frame);
                },
                ended = end, if code.is_none() => *code = Some(ended.map_or(137, |(code, _)| code)),
                _ = container.changed(), if !*container_gone => {
                    *container_gone = true;
                    // Ended already is as good.
                    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
                }
                () = tokio::time::sleep(SILENCE), if code.is_some() => {
                    (*output, *errors) = (None, None);
                }
            }
        }
    }
}

/// A frame of what can be read now; none if it is not wanted, or if there will be no more.
fn poll_read(
    source: &mut Option<Source>,
    kind: Kind,
    context: &mut Context<'_>,
) -> Poll<Option<Bytes>> {
    let Some(Source { from, wanted }) = source else {
        return Poll::Pending;
    };
    // Not kept from one time to the next: a silent command needs no memory.
    let (read, frame) = frame(kind, BLOCK, |block| {
        pin!(from.read_buf(block)).poll(context)
    });
    match read {
        Poll::Pending => Poll::Pending,
        Poll::Ready(Ok(read)) if read > 0 => Poll::Ready(frame.filter(|_| *wanted)),
        Poll::Ready(_) => {
            *source = None;
            Poll::Ready(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use tokio::io::AsyncWriteExt;

    use super::super::output::Pipes;
    use super::*;
    use pod_protocol::streams::{Decoder, Word};

    /// A process of the host, as if it ran in a container.
    struct Started {
        command: ProcessOutput,
        input: Option<tokio::net::unix::pipe::Sender>,
        container: watch::Sender<()>,
    }

    fn start(script: &str) -> Started {
        let pipes = Pipes::new(false, true).unwrap();
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
        let (tell, end) = oneshot::channel();
        std::thread::spawn(move || {
            use std::os::unix::process::ExitStatusExt;
            let status = child.wait().unwrap();
            let signal = status.signal();
            let code = status.code().unwrap_or(128 + signal.unwrap_or(0));
            let _ = tell.send((code, signal));
        });
        let ends = pipes.open(None, true).unwrap();
        let source = |from| Source { from, wanted: true };
        let container = watch::Sender::new(());
        Started {
            command: ProcessOutput {
                output: ends.output.map(source),
                errors: ends.errors.map(source),
                process,
                end,
                container: container.subscribe(),
            },
            input: ends.input,
            container,
        }
    }

    async fn all(mut frames: Frames) -> (String, String, Option<Ending>) {
        let mut decoder = Decoder::default();
        let (mut output, mut errors, mut end) = (Vec::new(), Vec::new(), None);
        while let Some(frame) = frames.next().await {
            decoder.push(frame);
            while let Some(word) = decoder.take().unwrap() {
                match word {
                    Word::Output(bytes) => output.extend_from_slice(&bytes),
                    Word::Errors(bytes) => errors.extend_from_slice(&bytes),
                    Word::Ended(ending) => end = Some(ending),
                    other => panic!("{other:?}"),
                }
            }
        }
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(output), text(errors), end)
    }

    #[tokio::test]
    async fn both_outputs_and_the_code() {
        let mut started = start("cat; echo bad >&2; exit 3");
        let mut input = started.input.take().unwrap();
        input.write_all(b"good").await.unwrap();
        drop(input);
        let (output, errors, end) = all(started.command.frames()).await;
        assert_eq!((&*output, &*errors), ("good", "bad\n"));
        assert_eq!(end, Some(Ending::Code(3)));
        let killed = start("kill -TERM $$");
        assert_eq!(
            all(killed.command.frames()).await.2,
            Some(Ending::Code(143))
        );
    }

    #[tokio::test]
    async fn what_it_said_before_its_end_is_all_told() {
        let started = start("head -c 3000000 /dev/zero | tr '\\0' x");
        let mut frames = started.command.frames();
        // Slow at first: by now the pipe is full.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut length = 0;
        while let Some(frame) = frames.next().await {
            length += frame.len();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(length > 3_000_000);
    }

    #[tokio::test]
    async fn what_it_left_behind_does_not_hold_the_end_up() {
        let started = start("sleep 20 & echo done");
        let before = Instant::now();
        let (output, _, end) = all(started.command.frames()).await;
        assert_eq!((&*output, end), ("done\n", Some(Ending::Code(0))));
        assert!(before.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn it_ends_with_its_container() {
        let started = start("sleep 20");
        drop(started.container);
        let (_, _, end) = all(started.command.frames()).await;
        assert_eq!(end, Some(Ending::Code(137)));
    }
}
