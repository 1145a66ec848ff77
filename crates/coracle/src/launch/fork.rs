//! Starts a pod's sandbox as a child of the agent. Its usage counts towards the agent's step.

use std::process::Stdio;

use anyhow::Context;
use kubelet::LaunchRequest;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use super::NodeLauncher;

/// Starts a sandbox and sends it its configuration.
pub async fn start(launcher: &NodeLauncher, request: &LaunchRequest) -> anyhow::Result<Child> {
    let line = launcher.config_line(request).await?;
    let mut child = Command::new("/proc/self/exe")
        .args(["internal", "sandbox"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .context("cannot start a process")?;
    let mut input = child
        .stdin
        .take()
        .context("the sandbox has no standard input")?;
    input.write_all(line.as_bytes()).await?;
    Ok(child)
}
