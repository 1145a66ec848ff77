//! The leader's handle to the control plane's process: commands in, events out.

use console::{Failure, FailureCode};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use control_plane::dir::ControlPlaneDirOfPid;
use control_plane::{ClusterConfig, ControlPlaneCommand, ControlPlaneEvent};
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

/// Time that all components have to stop when their store is to be saved.
const SAVE_TIMEOUT: Duration = Duration::from_secs(20);

/// The running control plane.
pub struct ControlPlaneProcess {
    child: Child,
    commands: Option<ChildStdin>,
    events: Lines<BufReader<ChildStdout>>,
    pid: Option<u32>,
}

impl ControlPlaneProcess {
    /// Starts the process and sends it `config`.
    pub async fn start(config: ClusterConfig) -> anyhow::Result<Self> {
        let mut command = tokio::process::Command::new("/proc/self/exe");
        command
            .args(["internal", "control-plane"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::KILL);
        let mut child = command
            .spawn()
            .context("cannot start the control plane's process")?;
        let stdout = child
            .stdout
            .take()
            .context("no pipe from the control plane")?;
        let mut control_plane = Self {
            commands: child.stdin.take(),
            child,
            events: BufReader::new(stdout).lines(),
            pid: None,
        };
        control_plane
            .send(&ControlPlaneCommand::Start(Box::new(config)))
            .await?;
        Ok(control_plane)
    }

    /// The next event; an error if the control plane has ended.
    pub async fn next_event(&mut self) -> Result<ControlPlaneEvent, Failure> {
        let line = self.events.next_line().await.ok().flatten();
        let event = line.and_then(|line| serde_json::from_str(&line).ok());
        match event {
            Some(ControlPlaneEvent::Up { pid }) => {
                self.pid = Some(pid);
                Ok(ControlPlaneEvent::Up { pid })
            }
            Some(ControlPlaneEvent::SetupFailed { reason }) => {
                Err(Failure::new(FailureCode::Host, reason))
            }
            Some(ControlPlaneEvent::Failed {
                component,
                reason,
                tail,
            }) => Err(Failure::new(
                FailureCode::NotStarted,
                format!("{component} failed: {reason}\n{}", indent(&tail)),
            )
            .with_hint("run again with --logs DIR to keep the complete logs")),
            Some(event) => Ok(event),
            None => Err(Failure::new(
                FailureCode::Broken,
                "the control plane's process was killed from outside",
            )
            .with_hint("the job may have reached its memory limit: try again with a larger --mem")),
        }
    }

    /// The control plane's directory, as other processes see it.
    pub fn dir(&self) -> Option<ControlPlaneDirOfPid> {
        self.pid.map(ControlPlaneDirOfPid::new)
    }

    /// Stops it in order, and kills it after `timeout`.
    pub async fn stop(mut self, timeout: Duration) {
        drop(self.commands.take());
        if let Err(error) = self.drain(timeout).await {
            tracing::debug!(%error, "the control plane did not end in order");
        }
    }

    /// Stops it in order and copies its store to the new directory `path`.
    pub async fn stop_and_save(mut self, path: &Path) -> anyhow::Result<()> {
        self.send(&ControlPlaneCommand::StopComponents).await?;
        let stopped = async {
            while self.next_event().await? != ControlPlaneEvent::Stopped {}
            Ok::<_, Failure>(())
        };
        tokio::time::timeout(SAVE_TIMEOUT, stopped)
            .await
            .context("the control plane did not stop")??;
        let dir = self.dir().context("the control plane never started")?;
        control_plane::seed::copy(&dir.store(), path)
            .with_context(|| format!("cannot write {}", path.display()))
        // Dropping `self` kills the process.
    }

    /// Reads events until the process has ended.
    async fn drain(&mut self, timeout: Duration) -> Result<(), Failure> {
        let end = async {
            while self.next_event().await? != ControlPlaneEvent::Stopped {}
            let _ = self.child.wait().await;
            Ok(())
        };
        let ended = tokio::time::timeout(timeout, end).await;
        // Does nothing if it has exited already.
        let _ = self.child.kill().await;
        ended.unwrap_or_else(|_| {
            Err(Failure::new(
                FailureCode::Broken,
                "the control plane did not stop",
            ))
        })
    }

    async fn send(&mut self, command: &ControlPlaneCommand) -> anyhow::Result<()> {
        let line = format!("{}\n", serde_json::to_string(command)?);
        let pipe = self
            .commands
            .as_mut()
            .context("the control plane is stopping")?;
        // If the process has died, its last event gives the reason.
        let _ = pipe.write_all(line.as_bytes()).await;
        Ok(())
    }
}

fn indent(lines: &[String]) -> String {
    lines
        .iter()
        .map(|line| format!("  | {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}
