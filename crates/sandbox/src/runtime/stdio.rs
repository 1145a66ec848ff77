//! The standard streams of a process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;

use rustix::pipe::PipeFlags;
use tokio::io::AsyncRead;
use tokio::net::unix::pipe;

use super::terminal_output::TerminalOutput;

/// Pipes for the standard streams of a process that is to be started. With a terminal there are none.
pub struct StdioPipes {
    theirs: Vec<OwnedFd>,
    stdin: Option<OwnedFd>,
    output: Option<(OwnedFd, OwnedFd)>,
}

impl StdioPipes {
    /// Creates the pipes. Without `with_stdin`, standard input is /dev/null.
    pub fn new(terminal: bool, with_stdin: bool) -> io::Result<Self> {
        if terminal {
            return Ok(Self {
                theirs: Vec::new(),
                stdin: None,
                output: None,
            });
        }
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
        let (stdin, our_stdin) = if with_stdin {
            let (read, write) = pipe()?;
            (read, Some(write))
        } else {
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            (
                rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())?,
                None,
            )
        };
        let (our_stdout, stdout) = pipe()?;
        let (our_stderr, stderr) = pipe()?;
        Ok(Self {
            theirs: vec![stdin, stdout, stderr],
            stdin: our_stdin,
            output: Some((our_stdout, our_stderr)),
        })
    }

    /// The ends for the process.
    pub fn theirs(&self) -> Vec<BorrowedFd<'_>> {
        self.theirs.iter().map(AsFd::as_fd).collect()
    }

    /// Closes the process's ends and opens ours. `terminal` is the master side of the process's terminal, if it has one.
    pub fn open(self, terminal: Option<OwnedFd>, with_stdin: bool) -> io::Result<StdioStreams> {
        let Self {
            theirs,
            stdin,
            output,
        } = self;
        drop(theirs);
        let Some(terminal) = terminal else {
            let (stdout, stderr) = output.unzip();
            let reader = |end: OwnedFd| -> io::Result<OutputReader> {
                Ok(Box::pin(pipe::Receiver::from_owned_fd(end)?))
            };
            return Ok(StdioStreams {
                stdin: stdin.map(pipe::Sender::from_owned_fd).transpose()?,
                stdout: stdout.map(reader).transpose()?,
                stderr: stderr.map(reader).transpose()?,
                terminal: None,
            });
        };
        let master = terminal.try_clone()?;
        let stdin = with_stdin.then(|| terminal.try_clone()).transpose()?;
        let output = TerminalOutput::new(terminal)?;
        Ok(StdioStreams {
            // Not a pipe, but tokio waits for it in the same way. AsyncFd would need `unsafe`.
            stdin: stdin
                .map(pipe::Sender::from_owned_fd_unchecked)
                .transpose()?,
            stdout: Some(Box::pin(output)),
            stderr: None,
            terminal: Some(Rc::new(master)),
        })
    }
}

/// Reads an output stream of a process.
pub type OutputReader = Pin<Box<dyn AsyncRead>>;

/// Our ends of a process's standard streams.
#[derive(Default)]
pub struct StdioStreams {
    /// Writes to its standard input; the process reads end-of-file when this is dropped.
    pub stdin: Option<pipe::Sender>,
    /// Its standard output, or its terminal.
    pub stdout: Option<OutputReader>,
    /// Its standard error.
    pub stderr: Option<OutputReader>,
    /// The master side of its terminal.
    pub terminal: Option<Rc<OwnedFd>>,
}
