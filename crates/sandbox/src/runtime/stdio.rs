//! The standard streams of a process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use linux::async_fd::{InputWriter, OutputReader};
use rustix::pipe::PipeFlags;

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
            return Ok(StdioStreams {
                stdin: stdin.map(InputWriter::new).transpose()?,
                stdout: stdout.map(OutputReader::new).transpose()?,
                stderr: stderr.map(OutputReader::new).transpose()?,
                terminal: None,
            });
        };
        let master = terminal.try_clone()?;
        let stdin = with_stdin.then(|| terminal.try_clone()).transpose()?;
        Ok(StdioStreams {
            stdin: stdin.map(InputWriter::new).transpose()?,
            stdout: Some(OutputReader::new(terminal)?),
            stderr: None,
            terminal: Some(Rc::new(master)),
        })
    }
}

/// Our ends of a process's standard streams.
#[derive(Default)]
pub struct StdioStreams {
    /// Writes to its standard input; the process reads end-of-file when this is dropped.
    pub stdin: Option<InputWriter>,
    /// Its standard output, or its terminal.
    pub stdout: Option<OutputReader>,
    /// Its standard error.
    pub stderr: Option<OutputReader>,
    /// The master side of its terminal.
    pub terminal: Option<Rc<OwnedFd>>,
}
