//! `coracle internal free-layers DIR LOW AGE`: removes unpacked layers that no pod uses, until disk usage is low enough.

use std::io::Write;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::bail;
use images::{ImageGcPolicy, Layers};
use rustix::thread::UnshareFlags;

/// Entry point of the role; see [`Layers::collect_garbage`].
pub fn main(layers: &Path, low_threshold: u64, min_age: Duration) -> anyhow::Result<ExitCode> {
    linux::namespace::enter_as_root(UnshareFlags::empty())?;
    let removed = Layers::open(layers)?.collect_garbage(low_threshold, min_age)?;
    writeln!(std::io::stdout(), "{removed} layers removed")?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the role and returns its output. A process of its own, because the files belong to ids of the node's user namespace, which a
/// process with several threads cannot enter.
pub async fn run_process(layers: &Path, policy: ImageGcPolicy) -> anyhow::Result<String> {
    let output = tokio::process::Command::new("/proc/self/exe")
        .args(["internal", "free-layers"])
        .arg(layers)
        .arg(policy.low_threshold_percent.to_string())
        .arg(policy.min_age.as_secs().to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
