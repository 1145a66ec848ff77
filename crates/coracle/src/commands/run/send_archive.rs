//! Sends the archive from the submitting host to the leader's node, through a step of the job.

use console::{Failure, FailureCode, print_stderr};
use std::io::{self, BufWriter};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use slurm::{Slurm, Submission};
use tokio::io::AsyncReadExt;

use super::file_check::CarryRequest;
use cluster::carry::archive::CarryArchive;
use cluster::carry::program_stream::ProgramStream;
use cluster::carry::script::{self, SHELL};

/// Limit on the receiver's standard error that is repeated in an error.
const MAX_STDERR: u64 = 16 * 1024;

/// Sends this program and `archive` to a node of a running job.
pub async fn carry(
    slurm: &Slurm,
    archive: Arc<CarryArchive>,
    to: &CarryRequest,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let (contents, node) = (contents(&archive), to.node.as_str());
    let program = ProgramStream::of_this_program()
        .await
        .context("cannot read our own program")?;
    let shell = script::receive_command("error:", &program, &to.dir);
    let options = ["--chdir=/", "--quiet"].map(str::to_owned);
    let submission = Submission {
        options: &options,
        within: Some((to.job, node)),
        program: Path::new(SHELL),
        args: &shell.args,
        terminal: false,
        name: "coracle-carry",
    };
    let names = slurm::environment_names();
    let mut invocation = submission.invocation(slurm, names.iter().map(String::as_str));
    invocation.env_set.push(shell.variable());
    tracing::debug!(command = invocation.display(), "carrying the archive");
    // No kill_on_drop: the receiver cleans up when this end of the pipe closes.
    let mut child = tokio::process::Command::from(invocation.std_command())
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start srun")?;
    let sending = program.send(child.stdin.take(), move |pipe| {
        archive.write(BufWriter::with_capacity(1 << 20, pipe))
    });
    let mut stderr = Vec::new();
    if let Some(pipe) = child.stderr.take() {
        let _ = pipe.take(MAX_STDERR).read_to_end(&mut stderr).await;
    }
    let status = child.wait().await.context("cannot wait for srun")?;
    let sent = sending.await?;
    match sent {
        // If the receiver closed the pipe, its standard error gives the reason.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            return Err(error).context(format!("cannot read {contents}"));
        }
        Ok(()) if status.success() => {}
        _ => return Err(carry_failure(&contents, node, status.code(), &stderr).into()),
    }
    print_stderr(format_args!(
        "coracle: carried {contents} to {node}, which does not see all of it ({:.2} s)",
        began.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Lists the contents of an archive for a message.
fn contents(archive: &CarryArchive) -> String {
    let mut contents = "coracle".to_owned();
    if let Some(release) = &archive.release {
        contents.push_str(&format!(", Kubernetes {}", release.version));
    }
    if let Some(name) = archive.workload.as_ref().and_then(|path| path.file_name()) {
        contents.push_str(&format!(", {}", name.display()));
    }
    contents
}

fn carry_failure(contents: &str, node: &str, code: Option<i32>, stderr: &[u8]) -> Failure {
    let stderr = String::from_utf8_lossy(stderr);
    let lines = stderr.lines().filter(|line| !slurm::is_noise(line));
    let quoted: Vec<String> = lines.map(|line| format!("  | {line}")).collect();
    let code = if code == Some(FailureCode::CannotWrite as i32) {
        FailureCode::CannotWrite
    } else {
        FailureCode::NotStarted
    };
    Failure::new(
        code,
        format!("cannot carry {contents} to {node}\n{}", quoted.join("\n")),
    )
    .with_hint(
        "the node needs about 300 MB of space in /tmp; or put the files where the nodes see them",
    )
}
