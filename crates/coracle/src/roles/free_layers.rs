//! `coracle internal free-layers DIR LOW AGE`: removes unpacked layers that no pod uses, until disk usage is low enough.

use std::io::Write;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::bail;
use images::Layers;
use rustix::thread::UnshareFlags;

use crate::settings::image_gc::ImageGcPolicy;

/// Entry point of the role: removes layers that were not used for `min_age` until disk usage is at most `low_threshold` percent.
pub fn main(layers: &Path, low_threshold: u64, min_age: Duration) -> anyhow::Result<ExitCode> {
    linux::namespace::enter_as_root(UnshareFlags::empty())?;
    let is_low = || disk_usage_percent(layers).is_none_or(|used| used <= low_threshold);
    let removed = Layers::open(layers)?.prune_until(min_age, is_low)?;
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

/// Disk usage in percent as upstream counts it; `None` if it is unknown.
pub fn disk_usage_percent(dir: &Path) -> Option<u64> {
    let file_system = rustix::fs::statvfs(dir).ok()?;
    let free = file_system
        .f_bavail
        .saturating_mul(100)
        .checked_div(file_system.f_blocks)?;
    Some(100_u64.saturating_sub(free))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_at_most_100_percent() {
        assert!(disk_usage_percent(Path::new("/")).is_some_and(|used| used <= 100));
        assert_eq!(disk_usage_percent(Path::new("/no/such/directory")), None);
    }
}
