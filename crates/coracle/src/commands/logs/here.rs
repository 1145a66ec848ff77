//! The user's clusters on this host, found by the tmpfs that the processes of a control plane share.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use control_plane::dir::ControlPlaneDirOfPid;

/// A cluster whose leader runs on this host.
#[derive(Debug, Clone)]
pub struct Found {
    pub name: String,
    /// The job that it runs in.
    pub job: Option<u32>,
    files: ControlPlaneDirOfPid,
}

impl Found {
    /// The directory of its components' logs.
    pub fn logs(&self) -> PathBuf {
        self.files.logs()
    }

    /// The path of its administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.files.kubeconfig()
    }
}

/// All clusters on this host, sorted by name.
pub fn find() -> Vec<Found> {
    let mut places = HashSet::new();
    let mut found = Vec::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(pid) = pid
            && runs_as(&entry.path(), b"control-plane")
            && !is_in_a_pod(pid)
            && let Some(cluster) = look(pid)
            // The init process of the control plane and its parent outside see the same directory.
            && places.insert(cluster.1)
        {
            found.push(cluster.0);
        }
    }
    found.sort_by(|a: &Found, b| a.name.cmp(&b.name));
    found
}

/// Whether the command line of a process is `coracle internal ROLE`. Other users' directories can't be read anyway, but processes in
/// pods can have any command line.
fn runs_as(process: &Path, role: &[u8]) -> bool {
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).skip(1);
    words.next() == Some(b"internal") && words.next() == Some(role)
}

/// Whether a process may be in a pod. Pods are in user namespaces below the hub's, which is below ours; a control plane is in ours or
/// in a child of it. (With `hidepid`, `/proc` does not show the sandbox above a container.)
fn is_in_a_pod(pid: u32) -> bool {
    let namespace = linux::fresh::namespace_of(pid.cast_signed(), "user");
    let level = namespace.and_then(linux::namespace::level_below_own);
    !matches!(level, Ok(0 | 1))
}

/// The cluster whose directory this process sees, and the identity of that directory.
fn look(pid: u32) -> Option<(Found, u64)> {
    let files = ControlPlaneDirOfPid::new(pid);
    let text = std::fs::read_to_string(files.kubeconfig()).ok()?;
    let place = std::fs::metadata(files.kubeconfig()).ok()?.dev();
    let name = context(&text)?.to_owned();
    let found = Found {
        job: job(&name),
        name,
        files,
    };
    Some((found, place))
}

/// The cluster's name: the current context of its kubeconfig.
fn context(kubeconfig: &str) -> Option<&str> {
    let line = kubeconfig
        .lines()
        .find_map(|line| line.strip_prefix("current-context:"))?;
    let name = line.trim().trim_matches('"');
    (!name.is_empty()).then_some(name)
}

/// The job in a cluster's name, `coracle-JOB-xxxx`.
fn job(name: &str) -> Option<u32> {
    name.strip_prefix("coracle-")?
        .split('-')
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_name_is_read_from_kubeconfig() {
        let text = control_plane::kubeconfig::kubeconfig(
            "coracle-12-ab34",
            "https://10.0.0.1:6443",
            "PEM",
            &control_plane::pki::TlsIdentity {
                cert_pem: "CERT".to_owned(),
                key_pem: "KEY".to_owned(),
            },
        );
        assert_eq!(context(&text), Some("coracle-12-ab34"));
        assert_eq!(job("coracle-12-ab34"), Some(12));
        assert_eq!(job("seed"), None);
    }
}
