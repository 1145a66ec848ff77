//! Where a process's output goes: a container's to its log, a command's to whoever asked.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::pipe::PipeFlags;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;

use super::inside::Inside;
use crate::inner::message::Request;
use crate::logs::LogWriter;
use crate::protocol::Problem;
use crate::seams::ExecResult;
use crate::terminal::TerminalOutput;

/// So much of a command's output is kept.
const MAX_OUTPUT: u64 = 10 << 10;

/// The standard streams of a process, ours and its.
pub struct Pipes {
    theirs: Vec<OwnedFd>,
    input: Option<OwnedFd>,
    output: Option<(OwnedFd, OwnedFd)>,
}

impl Pipes {
    /// Makes them. With a terminal there are none: its master side comes when the process is there.
    pub fn new(terminal: bool, with_input: bool) -> io::Result<Self> {
        if terminal {
            return Ok(Self {
                theirs: Vec::new(),
                input: None,
                output: None,
            });
        }
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
        let (input, our_input) = if with_input {
            let (read, write) = pipe()?;
            (read, Some(write))
        } else {
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            (
                rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())?,
                None,
            )
        };
        let (our_output, output) = pipe()?;
        let (our_errors, errors) = pipe()?;
        Ok(Self {
            theirs: vec![input, output, errors],
            input: our_input,
            output: Some((our_output, our_errors)),
        })
    }

    /// The process's ends.
    pub fn theirs(&self) -> Vec<BorrowedFd<'_>> {
        self.theirs.iter().map(AsFd::as_fd).collect()
    }

    /// Copies output to a log until the process, and whoever inherited its streams, has closed them.
    pub async fn copy(self, terminal: Option<OwnedFd>, log: LogWriter) {
        let Self {
            theirs,
            input,
            output,
        } = self;
        drop(theirs);
        let copied = async {
            match (terminal, output) {
                (Some(terminal), _) => {
                    let output = TerminalOutput::new(terminal)?;
                    log.copy(output, None::<tokio::io::Empty>).await;
                }
                (None, Some((output, errors))) => {
                    let output = pipe::Receiver::from_owned_fd(output)?;
                    let errors = pipe::Receiver::from_owned_fd(errors)?;
                    log.copy(output, Some(errors)).await;
                }
                (None, None) => {}
            }
            Ok::<_, io::Error>(())
        };
        if let Err(error) = copied.await {
            tracing::warn!(%error, "a container's output is lost");
        }
        // Held until now, so that the process doesn't see the end of its input.
        drop(input);
    }
}

/// Runs a command inside and collects what it says.
pub async fn exec(
    inside: &Inside,
    request: Request,
    timeout: Duration,
) -> Result<ExecResult, Problem> {
    let problem = |message: String| Problem {
        reason: "ExecError".to_owned(),
        message,
    };
    let pipes = Pipes::new(false, false).map_err(|error| problem(error.to_string()))?;
    let started = inside.start(request, &pipes.theirs()).await;
    let mut process = started.map_err(|refusal| problem(refusal.message))?;
    let Pipes { theirs, output, .. } = pipes;
    drop(theirs);
    // Also when nobody waits for it any more: a probe that was cut short leaves no process.
    let _killed = KillOnDrop(process.descriptors.drain(..).next());
    let mut text = Vec::new();
    let ended = tokio::time::timeout(timeout, async {
        if let Some((output, errors)) = output {
            let (mut output, mut errors) = (
                pipe::Receiver::from_owned_fd(output)?,
                pipe::Receiver::from_owned_fd(errors)?,
            );
            let mut more = Vec::new();
            tokio::try_join!(read(&mut output, &mut text), read(&mut errors, &mut more))?;
            text.append(&mut more);
        }
        let end = (&mut process.end).await;
        Ok::<_, io::Error>(end.map_or(137, |(code, _)| code))
    });
    let code = match ended.await {
        Ok(code) => Some(code.map_err(|error| problem(error.to_string()))?),
        Err(_) => None,
    };
    text.truncate(MAX_OUTPUT as usize);
    Ok(ExecResult {
        code,
        output: String::from_utf8_lossy(&text).into_owned(),
    })
}

/// Kills a process, if it still runs.
struct KillOnDrop(Option<OwnedFd>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            let _ = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL);
        }
    }
}

/// Keeps the beginning, and reads on so that the command doesn't wait for us.
async fn read(from: &mut (impl AsyncRead + Unpin), into: &mut Vec<u8>) -> io::Result<()> {
    let mut head = from.take(MAX_OUTPUT);
    head.read_to_end(into).await?;
    tokio::io::copy(head.into_inner(), &mut tokio::io::sink()).await?;
    Ok(())
}
