//! Outside of an allocation's nodes: `coracle run` asks Slurm to call it again inside.

use std::io::IsTerminal;
use std::process::{ExitCode, ExitStatus, Stdio};

use anyhow::Context;
use rustix::process::{Pid, Signal};
use slurm::{Allocation, Invocation, Slurm, SlurmError, Submission};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};

use super::Settings;
use super::workload::Workload;
use crate::carried;
use crate::exit::{self, Code, Failure};

/// How much of the end of standard error is looked at for Slurm's words.
const KEPT_BYTES: usize = 16 * 1024;
/// How every line of the leader's own begins.
const OUR_WORDS: &str = "\ncoracle: ";

/// Asks Slurm for a new job with the user's options.
pub async fn new_job(settings: &Settings, workload: &Workload) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(Failure::from)?;
    slurm.ping().await.map_err(Failure::from)?;
    call_again(&slurm, settings, workload, None).await
}

/// Moves from `salloc`'s shell to the first node of the allocation.
pub async fn first_node(
    settings: &Settings,
    workload: &Workload,
    allocation: &Allocation,
) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(Failure::from)?;
    let first = allocation.nodes.first().ok_or_else(|| {
        Failure::new(
            Code::Slurm,
            format!("job {} has no nodes", allocation.job_id),
        )
        .hint("this shell seems to have the variables of another job: `unset SLURM_JOB_ID`")
    })?;
    call_again(&slurm, settings, workload, Some((allocation.job_id, first))).await
}

async fn call_again(
    slurm: &Slurm,
    settings: &Settings,
    workload: &Workload,
    within: Option<(u32, &str)>,
) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find our own program")?;
    let words = settings.words_inside();
    let env: Vec<String> = std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect();
    let terminal = wants_terminal(workload);
    let mut submission = Submission {
        options: if within.is_none() {
            &settings.slurm
        } else {
            &[]
        },
        within,
        program: &program,
        args: &words,
        bcast: None,
        terminal,
        name: "coracle",
    };
    let invocation = |s: &Submission<'_>| s.invocation(slurm, env.iter().map(String::as_str));
    let mut ended = run_once(&invocation(&submission), terminal).await?;
    let carried = carried::new_path()?;
    if let Err(SlurmError::ProgramNotFound { .. }) = &ended {
        submission.bcast = Some(&carried);
        ended = run_once(&invocation(&submission), terminal).await?;
    }
    let code = ended.map_err(Failure::from)?;
    Ok(exit::code(code))
}

/// A program that is started from a terminal gets one there too; manifests don't care.
fn wants_terminal(workload: &Workload) -> bool {
    matches!(workload, Workload::Program { .. })
        && std::io::stdin().is_terminal()
        && std::io::stdout().is_terminal()
}

/// Runs `srun` to its end. Slurm's own failures are told apart from the workload's by its words.
async fn run_once(
    invocation: &Invocation,
    terminal: bool,
) -> anyhow::Result<Result<i32, SlurmError>> {
    tracing::debug!(command = invocation.display(), "asking Slurm");
    let mut command = invocation.command();
    if terminal {
        // It must stay in the terminal's foreground.
        command = invocation.std_command().into();
        command.kill_on_drop(true);
        linux::process::bind_to_us_in_group(command.as_std_mut(), Signal::TERM);
    } else {
        linux::process::bind_to_us(command.as_std_mut(), Signal::TERM);
    }
    // With a terminal, all that the tasks say goes there; what is left is Slurm's own.
    command.stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start srun")?;
    let stderr = child.stderr.take();
    let said = tokio::spawn(async move {
        match stderr {
            Some(stderr) => relay(stderr).await,
            None => Default::default(),
        }
    });
    let (status, told) = wait(&mut child).await?;
    let (said, leader_spoke) = said.await.unwrap_or_default();
    let code = exit::of_child(status);
    if let Some(signal) = told
        && (!leader_spoke || code == exit::of_signal(Signal::INT))
    {
        // It was queued, or the leader heard an interrupt from us in place of the signal.
        return Ok(Ok(exit::of_signal(signal)));
    }
    if status.success() || leader_spoke {
        return Ok(Ok(code));
    }
    match slurm::classify("srun", Some(status), &said) {
        error @ SlurmError::ProgramNotFound { .. } => Ok(Err(error)),
        // The leader ended before it said anything of its start, and has told why.
        _ if said.contains(": task 0: ") => Ok(Ok(code)),
        error => Ok(Err(error)),
    }
}

/// Waits for srun, passing on what ends us: it hands the signal to the leader, which ends in order.
async fn wait(child: &mut Child) -> anyhow::Result<(ExitStatus, Option<Signal>)> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut told = None;
    loop {
        let signal = tokio::select! {
            status = child.wait() => return Ok((status?, told)),
            _ = interrupt.recv() => Signal::INT,
            _ = terminate.recv() => Signal::TERM,
            _ = hangup.recv() => Signal::HUP,
        };
        told.get_or_insert(signal);
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            // Whatever it was: srun would kill the tasks at once on others; on an interrupt they end
            // in order.
            let _ = rustix::process::kill_process(pid, Signal::INT);
        }
    }
}

/// Copies to our own standard error as it comes; returns the end of it, and whether the leader said
/// anything at all.
async fn relay(mut from: impl tokio::io::AsyncRead + Unpin) -> (String, bool) {
    // As after the end of a line.
    let mut kept = vec![b'\n'];
    let mut leader_spoke = false;
    let mut chunk = [0; 4096];
    let mut to = tokio::io::stderr();
    while let Ok(count) = from.read(&mut chunk).await {
        if count == 0 {
            break;
        }
        let _ = to.write_all(&chunk[..count]).await;
        let _ = to.flush().await;
        kept.extend_from_slice(&chunk[..count]);
        leader_spoke |= String::from_utf8_lossy(&kept).contains(OUR_WORDS);
        if kept.len() > 2 * KEPT_BYTES {
            kept.drain(..kept.len() - KEPT_BYTES);
        }
    }
    (String::from_utf8_lossy(&kept).into_owned(), leader_spoke)
}
