//! Sends the bundle from the submitting host to the leader's node, through a step of the job.

use console::{Failure, FailureCode, say};
use std::io::{self, BufWriter};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use slurm::{Slurm, Submission};
use tokio::io::AsyncReadExt;

use super::look::Asked;
use cluster::carry::bundle::Bundle;
use cluster::carry::program::Program;
use cluster::carry::script::{self, SHELL};

/// Limit on the receiver's standard error that is repeated in an error.
const MAX_WORDS: u64 = 16 * 1024;

/// Sends this program and `bundle` to a node of a running job.
pub async fn carry(slurm: &Slurm, bundle: Arc<Bundle>, to: &Asked) -> anyhow::Result<()> {
    let began = Instant::now();
    let (what, node) = (what(&bundle), to.node.as_str());
    let program = Program::own()
        .await
        .context("cannot read our own program")?;
    let args = script::receive("error:", &program, &to.dir);
    let options = ["--chdir=/", "--quiet"].map(str::to_owned);
    let submission = Submission {
        options: &options,
        within: Some((to.job, node)),
        program: Path::new(SHELL),
        args: &args,
        terminal: false,
        name: "coracle-carry",
    };
    let names: Vec<String> = std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect();
    let invocation = submission.invocation(slurm, names.iter().map(String::as_str));
    tracing::debug!(command = invocation.display(), "carrying");
    // No kill_on_drop: the receiver cleans up when this end of the pipe closes.
    let mut child = tokio::process::Command::from(invocation.std_command())
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start srun")?;
    let sending = program.send(child.stdin.take(), move |pipe| {
        bundle.write(BufWriter::with_capacity(1 << 20, pipe))
    });
    let mut words = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        let _ = stderr.take(MAX_WORDS).read_to_end(&mut words).await;
    }
    let status = child.wait().await.context("cannot wait for srun")?;
    let sent = sending.await?;
    match sent {
        // If the receiver closed the pipe, its standard error gives the reason.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            return Err(error).context(format!("cannot read {what}"));
        }
        Ok(()) if status.success() => {}
        _ => return Err(refused(&what, node, status.code(), &words).into()),
    }
    say(format_args!(
        "coracle: carried {what} to {node}, which does not see all of it ({:.2} s)",
        began.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Lists the contents of a bundle for a message.
fn what(bundle: &Bundle) -> String {
    let mut words = "coracle".to_owned();
    if let Some(release) = &bundle.release {
        words.push_str(&format!(", Kubernetes {}", release.version));
    }
    if let Some(name) = bundle.workload.as_ref().and_then(|path| path.file_name()) {
        words.push_str(&format!(", {}", name.display()));
    }
    words
}

fn refused(what: &str, node: &str, code: Option<i32>, words: &[u8]) -> Failure {
    let words = String::from_utf8_lossy(words);
    let lines = words.lines().filter(|line| !slurm::is_noise(line));
    let words: Vec<String> = lines.map(|line| format!("  | {line}")).collect();
    let code = if code == Some(FailureCode::CannotWrite as i32) {
        FailureCode::CannotWrite
    } else {
        FailureCode::NotStarted
    };
    Failure::new(
        code,
        format!("cannot carry {what} to {node}\n{}", words.join("\n")),
    )
    .hint("they need about 300 MB of room in /tmp there; or put them where the nodes see them")
}
