//! The user's clusters on this host: each is the place in memory that a control plane's processes share.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use control_plane::dir::ControlPlaneDirOfPid;

/// A cluster that leads on this host.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// The job that it is in.
    pub job: Option<u32>,
    files: ControlPlaneDirOfPid,
}

impl Found {
    /// The directory with its components' logs.
    pub fn logs(&self) -> PathBuf {
        self.files.logs()
    }

    /// Its administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.files.kubeconfig()
    }
}

/// All of them, in the order of their names.
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
            // The first process and its parent outside see the same.
            && places.insert(cluster.1)
        {
            found.push(cluster.0);
        }
    }
    found.sort_by(|a: &Found, b| a.name.cmp(&b.name));
    found
}

/// Whether a process calls itself `coracle internal ROLE`. Others' places can't be seen in any case, but what is in a pod may
/// call itself anything.
fn runs_as(process: &Path, role: &[u8]) -> bool {
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).skip(1);
    words.next() == Some(b"internal") && words.next() == Some(role)
}

/// Whether a process may be in a pod: those are in a user namespace below the hub's, which is below ours. A control plane is in
/// ours, or in one directly below it. (Where `/proc` is mounted with `hidepid` it does not show the sandbox above a container.)
fn is_in_a_pod(pid: u32) -> bool {
    let namespace = linux::fresh::namespace_of(pid.cast_signed(), "user");
    let level = namespace.and_then(linux::namespace::level_below_own);
    !matches!(level, Ok(0 | 1))
}

/// The cluster whose place this process sees, and what tells that place from others.
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

/// The name of a cluster, which is that of its kubeconfig's context.
fn context(kubeconfig: &str) -> Option<&str> {
    let line = kubeconfig
        .lines()
        .find_map(|line| line.strip_prefix("current-context:"))?;
    let name = line.trim().trim_matches('"');
    (!name.is_empty()).then_some(name)
}

/// `coracle-JOB-xxxx`
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
    fn a_cluster_is_known_by_its_kubeconfig() {
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
