//! `coracle internal probe NAME`: tests one feature of this host.

use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use crate::exit;

/// Time-out of a probe. Probes take milliseconds; a hanging file system must not hang the caller.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Entry point of the role.
pub fn main(name: &str) -> anyhow::Result<ExitCode> {
    Ok(exit::code(linux::probe::main(name)))
}

/// Tests overlayfs with its upper layer below `dir`.
pub async fn overlayfs_in(dir: &Path) -> Result<String, String> {
    let upper = tempfile::Builder::new()
        .prefix("coracle-doctor-")
        .tempdir_in(dir)
        .map_err(|error| format!("{}: {error}", dir.display()))?;
    let result = run_process(&format!("overlay={}", upper.path().display())).await;
    // Overlayfs leaves a directory without any permission in its work directory, which would stop the removal.
    use std::os::unix::fs::PermissionsExt as _;
    let work_dir = upper.path().join("work/work");
    let _ = std::fs::set_permissions(work_dir, std::fs::Permissions::from_mode(0o700));
    result
}

/// Runs a probe in a process of its own: a process that has entered namespaces cannot leave them.
pub async fn run_process(name: &str) -> Result<String, String> {
    let mut command = tokio::process::Command::new("/proc/self/exe");
    command
        .args(["internal", "probe", name])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    match tokio::time::timeout(PROBE_TIMEOUT, command.output()).await {
        Ok(Ok(output)) => linux::probe::parse_output(&String::from_utf8_lossy(&output.stdout)),
        Ok(Err(error)) => Err(format!("the probe did not start: {error}")),
        Err(_) => Err("the probe did not end".to_owned()),
    }
}
