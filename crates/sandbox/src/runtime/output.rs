//! The standard streams of processes, and the output of a command that is collected.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use rustix::pipe::PipeFlags;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;

use super::inside::Inside;
use crate::inner::message::Request;
use crate::seams::ExecResult;
use crate::terminal::TerminalOutput;
use pod_protocol::Problem;

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

    /// Our ends as they can be used. Those of the process are its alone from now on.
    pub fn open(self, terminal: Option<OwnedFd>, with_input: bool) -> io::Result<Ends> {
        let Self {
            theirs,
            input,
            output,
        } = self;
        drop(theirs);
        let Some(terminal) = terminal else {
            let (output, errors) = output.unzip();
            let reader = |end: OwnedFd| -> io::Result<Reader> {
                Ok(Box::pin(pipe::Receiver::from_owned_fd(end)?))
            };
            return Ok(Ends {
                input: input.map(pipe::Sender::from_owned_fd).transpose()?,
                output: output.map(reader).transpose()?,
                errors: errors.map(reader).transpose()?,
                terminal: None,
            });
        };
        let held = terminal.try_clone()?;
        let input = with_input.then(|| terminal.try_clone()).transpose()?;
        let output = TerminalOutput::new(terminal)?;
        Ok(Ends {
            // No pipe, but it is written and waited for like one.
            input: input
                .map(pipe::Sender::from_owned_fd_unchecked)
                .transpose()?,
            output: Some(Box::pin(output)),
            errors: None,
            terminal: Some(Rc::new(held)),
        })
    }
}

/// What a process says.
pub type Reader = Pin<Box<dyn AsyncRead>>;

/// Our ends of a process's streams.
#[derive(Default)]
pub struct Ends {
    /// To its standard input. While it is held, the process sees no end there.
    pub input: Option<pipe::Sender>,
    /// From its standard output, or its terminal.
    pub output: Option<Reader>,
    /// From its standard error.
    pub errors: Option<Reader>,
    /// Its terminal.
    pub terminal: Option<Rc<OwnedFd>>,
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
    let failed = |error: io::Error| problem(error.to_string());
    let pipes = Pipes::new(false, false).map_err(failed)?;
    let mut text = Vec::new();
    // The start too: a working directory may be on a server that doesn't answer.
    let ended = tokio::time::timeout(timeout, async {
        let started = inside.start(request, &pipes.theirs()).await;
        let mut process = started.map_err(|refusal| problem(refusal.message))?;
        let Pipes { theirs, output, .. } = pipes;
        drop(theirs);
        // Also when nobody waits for it any more: a probe that was cut short leaves no process.
        let _killed = KillOnDrop(process.descriptors.drain(..).next());
        if let Some((output, errors)) = output {
            let (mut output, mut errors) = (
                pipe::Receiver::from_owned_fd(output).map_err(failed)?,
                pipe::Receiver::from_owned_fd(errors).map_err(failed)?,
            );
            let mut more = Vec::new();
            let both = async {
                tokio::try_join!(read(&mut output, &mut text), read(&mut errors, &mut more))
            };
            both.await.map_err(failed)?;
            text.append(&mut more);
        }
        let end = (&mut process.end).await;
        Ok::<_, Problem>(end.map_or(137, |(code, _)| code))
    });
    // Without an answer in time there is no code.
    let code = ended.await.ok().transpose()?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inner::message::ProcessPlan;

    /// Nobody answers at the other end of the line, as if the command's working directory were on a server that is away.
    #[tokio::test(start_paused = true)]
    async fn a_command_that_does_not_even_start_has_its_time() {
        let (ours, _theirs) = linux::packet::pair().unwrap();
        let exec = async {
            let inside = Inside::new(ours).unwrap();
            let request = Request::Exec {
                container: 1,
                process: Box::new(ProcessPlan::default()),
            };
            exec(&inside, request, Duration::from_secs(3)).await
        };
        let result = tokio::task::LocalSet::new().run_until(exec).await.unwrap();
        assert_eq!((result.code, result.output.as_str()), (None, ""));
    }
}
