//! Probes of this host's features: each is `coracle internal probe NAME`.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// Time-out of a probe. Probes take milliseconds; a hanging file system must not hang the caller.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Tries overlayfs with its upper layer below `dir`.
pub async fn overlay_in(dir: &Path) -> Result<String, String> {
    let upper = tempfile::Builder::new()
        .prefix("coracle-doctor-")
        .tempdir_in(dir)
        .map_err(|error| format!("{}: {error}", dir.display()))?;
    let answer = run(&format!("overlay={}", upper.path().display())).await;
    // Overlayfs leaves a directory without any permission in its work directory, which would stop the removal.
    use std::os::unix::fs::PermissionsExt as _;
    let locked = upper.path().join("work/work");
    let _ = std::fs::set_permissions(locked, std::fs::Permissions::from_mode(0o700));
    answer
}

/// Runs a probe in a process of its own: a process that has tried namespaces can't be used for anything else.
pub async fn run(name: &str) -> Result<String, String> {
    let mut command = tokio::process::Command::new("/proc/self/exe");
    command
        .args(["internal", "probe", name])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    match tokio::time::timeout(PROBE_TIMEOUT, command.output()).await {
        Ok(Ok(output)) => linux::probe::parse_answer(&String::from_utf8_lossy(&output.stdout)),
        Ok(Err(error)) => Err(format!("the probe did not start: {error}")),
        Err(_) => Err("the probe did not end".to_owned()),
    }
}
