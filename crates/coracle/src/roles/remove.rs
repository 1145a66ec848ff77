//! `coracle internal remove DIR`: removes a directory that containers have written to.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};

use crate::node_dir;

/// Entry point of the role.
pub fn main(dir: &Path) -> anyhow::Result<ExitCode> {
    node_dir::remove_tree(dir)?;
    Ok(ExitCode::SUCCESS)
}

/// As [`node_dir::remove_tree`], for callers with several threads.
pub async fn run_process(dir: PathBuf) -> io::Result<()> {
    let output = tokio::process::Command::new("/proc/self/exe")
        .args(["internal", "remove"])
        .arg(&dir)
        .stdin(Stdio::null())
        .output()
        .await?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(stderr.trim().to_owned()))
}
