//! An `srun` in the foreground that may receive a copy of this program.

use std::process::Stdio;

use cluster::carry::program_stream::ProgramStream;
use slurm::{Invocation, SlurmError};
use tokio::process::{Child, Command};

/// Starts the command in this process group, so that Ctrl-C reaches srun, which then cancels its job or step. Sends `copy` to its
/// standard input. The caller reads its standard error.
pub fn spawn(
    invocation: &Invocation,
    copy: Option<ProgramStream>,
    stdout: Stdio,
) -> Result<Child, SlurmError> {
    let mut child = Command::from(invocation.std_command())
        .stdin(match copy {
            Some(_) => Stdio::piped(),
            None => Stdio::null(),
        })
        .stdout(stdout)
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| start_error(invocation, source))?;
    if let Some(program) = copy {
        // A step that exits at once closes the pipe; its standard error gives the reason.
        drop(program.send(child.stdin.take(), |_| Ok(())));
    }
    Ok(child)
}

/// The error of a command that cannot be started or waited for.
pub fn start_error(invocation: &Invocation, source: std::io::Error) -> SlurmError {
    SlurmError::Start {
        command: invocation.display(),
        source,
    }
}
