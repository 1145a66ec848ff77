//! Runs a program of upstream to read its version.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::release::ReleaseComponent;
use crate::version::ReleaseVersion;

/// Time that a program has to print its version: it may have to be read from a slow file system first.
pub const VERSION_TIMEOUT: Duration = Duration::from_secs(20);

/// Limit on the output of a program.
const MAX_VERSION_OUTPUT: u64 = 64 << 10;

/// A program did not report its version.
#[derive(Debug, thiserror::Error)]
pub enum VersionProbeError {
    /// It cannot be run.
    #[error("it cannot be run: {0}")]
    Run(io::Error),
    /// It did not exit in time.
    #[error("it did not exit within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// Its output is not a version.
    #[error("`{arguments}` printed {output:?}, which is not a version")]
    NotVersion {
        /// The arguments.
        arguments: String,
        /// The beginning of its output.
        output: String,
    },
}

/// The arguments that print a component's version, and the prefix of the line with the version.
fn version_arguments(component: ReleaseComponent) -> (&'static [&'static str], &'static str) {
    match component {
        ReleaseComponent::Etcd => (&["--version"], "etcd Version: "),
        ReleaseComponent::Kubectl => (&["version", "--client"], "Client Version: "),
        ReleaseComponent::ApiServer
        | ReleaseComponent::ControllerManager
        | ReleaseComponent::Scheduler => (&["--version"], "Kubernetes "),
    }
}

/// Runs a component and returns the version that it reports.
pub async fn version_of(
    component: ReleaseComponent,
    program: &Path,
    timeout: Duration,
) -> Result<ReleaseVersion, VersionProbeError> {
    let (arguments, prefix) = version_arguments(component);
    let output = tokio::time::timeout(timeout, read_output(program, arguments));
    let output = output
        .await
        .map_err(|_| VersionProbeError::TimedOut(timeout))?
        .map_err(VersionProbeError::Run)?;
    let version = output.lines().find_map(|line| {
        line.trim()
            .strip_prefix(prefix)?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    });
    version.ok_or_else(|| VersionProbeError::NotVersion {
        arguments: arguments.join(" "),
        output: output.trim().chars().take(100).collect(),
    })
}

async fn read_output(program: &Path, arguments: &[&str]) -> io::Result<String> {
    let mut child = Command::new(program)
        .args(arguments)
        // An empty environment: KUBECONFIG, kuberc or ETCD_* would change the output.
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout
            .take(MAX_VERSION_OUTPUT)
            .read_to_end(&mut output)
            .await?;
    }
    child.wait().await?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn probe(component: ReleaseComponent, script: &str) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(component.name());
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let version = runtime.block_on(async {
            loop {
                match version_of(component, &program, Duration::from_secs(5)).await {
                    // ETXTBSY: another test forked while this one had the script open for writing.
                    Err(VersionProbeError::Run(e))
                        if e.kind() == io::ErrorKind::ExecutableFileBusy => {}
                    result => return result,
                }
            }
        });
        version
            .map(|version| version.to_string())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn each_component_reports_its_version() {
        let kubernetes = r#"[ "$*" = --version ] && echo "Kubernetes v1.37.1""#;
        assert_eq!(
            probe(ReleaseComponent::ApiServer, kubernetes).unwrap(),
            "v1.37.1"
        );
        assert_eq!(
            probe(ReleaseComponent::Scheduler, kubernetes).unwrap(),
            "v1.37.1"
        );
        let kubectl = r#"[ "$*" = "version --client" ] && printf 'Client Version: v1.37.1\nKustomize Version: v5.8.0\n'"#;
        assert_eq!(
            probe(ReleaseComponent::Kubectl, kubectl).unwrap(),
            "v1.37.1"
        );
        let etcd = r#"[ "$*" = --version ] && printf 'etcd Version: 3.7.0\nGit SHA: unknown\n'"#;
        assert_eq!(probe(ReleaseComponent::Etcd, etcd).unwrap(), "v3.7.0");
    }

    #[test]
    fn missing_or_unexpected_output_is_an_error() {
        let error = probe(ReleaseComponent::ApiServer, "sleep 60").unwrap_err();
        assert_eq!(error, "it did not exit within 5 s");
        let error = probe(ReleaseComponent::ApiServer, "echo hello; exit 1").unwrap_err();
        assert_eq!(
            error,
            "`--version` printed \"hello\", which is not a version"
        );
        let error = probe(ReleaseComponent::Etcd, "yes").unwrap_err();
        assert!(
            error.starts_with("`--version` printed \"y\\ny\\n"),
            "{error}"
        );
        let error = probe(
            ReleaseComponent::ApiServer,
            "echo 'Kubernetes v0.0.0-master+$Format:%H$'",
        )
        .unwrap_err();
        assert!(error.contains("v0.0.0-master"), "{error}");
    }

    #[test]
    fn programs_do_not_get_the_users_environment() {
        let script = r#"[ -z "$HOME$CARGO_MANIFEST_DIR" ] && echo "Kubernetes v1.37.1""#;
        assert_eq!(
            probe(ReleaseComponent::ApiServer, script).unwrap(),
            "v1.37.1"
        );
    }
}
