//! The user's clusters on this host, found by the tmpfs that the processes of a control plane share.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use control_plane::dir::ControlPlaneDirOfPid;

/// A cluster whose leader runs on this host.
#[derive(Debug, Clone)]
pub struct LocalCluster {
    pub name: String,
    /// The job that it runs in.
    pub job: Option<u32>,
    dir: ControlPlaneDirOfPid,
}

impl LocalCluster {
    /// A cluster without a directory.
    #[cfg(test)]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            job: job_of(name),
            dir: ControlPlaneDirOfPid::new(0),
        }
    }

    /// The directory of its components' logs.
    pub fn logs(&self) -> PathBuf {
        self.dir.logs()
    }

    /// The path of its administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.kubeconfig()
    }
}

/// All clusters on this host, sorted by name.
pub fn find() -> Vec<LocalCluster> {
    let mut devices = HashSet::new();
    let mut clusters = Vec::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some(pid) = pid
            && runs_as(&entry.path(), b"control-plane")
            && !may_be_in_pod(pid)
            && let Some((cluster, device)) = cluster_of_process(pid)
            // The init process of the control plane and its parent outside see the same directory.
            && devices.insert(device)
        {
            clusters.push(cluster);
        }
    }
    clusters.sort_by(|a: &LocalCluster, b| a.name.cmp(&b.name));
    clusters
}

/// Whether the command line of a process is `coracle internal ROLE`. Other users' directories can't be read anyway, but processes in
/// pods can have any command line.
fn runs_as(process: &Path, role: &[u8]) -> bool {
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let mut args = line.split(|byte| *byte == 0).skip(1);
    args.next() == Some(b"internal") && args.next() == Some(role)
}

/// Whether a process may be in a pod. Pods are in user namespaces below the hub's, which is below ours; a control plane is in ours or
/// in a child of it. (With `hidepid`, `/proc` does not show the sandbox above a container.)
fn may_be_in_pod(pid: u32) -> bool {
    let namespace = linux::namespace::open_namespace(pid.cast_signed(), "user");
    let level = namespace.and_then(linux::namespace::level_below_own);
    !matches!(level, Ok(0 | 1))
}

/// The cluster whose directory this process sees, and the device number of that directory.
fn cluster_of_process(pid: u32) -> Option<(LocalCluster, u64)> {
    let dir = ControlPlaneDirOfPid::new(pid);
    let text = std::fs::read_to_string(dir.kubeconfig()).ok()?;
    let device = std::fs::metadata(dir.kubeconfig()).ok()?.dev();
    let name = current_context(&text)?.to_owned();
    // A control plane for a dry run or a seed is no cluster.
    let job = job_of(&name)?;
    let cluster = LocalCluster {
        job: Some(job),
        name,
        dir,
    };
    Some((cluster, device))
}

/// The cluster's name: the current context of its kubeconfig.
fn current_context(kubeconfig: &str) -> Option<&str> {
    let line = kubeconfig
        .lines()
        .find_map(|line| line.strip_prefix("current-context:"))?;
    let name = line.trim().trim_matches('"');
    (!name.is_empty()).then_some(name)
}

/// The job in a cluster's name, `coracle-JOB-xxxx`.
pub fn job_of(name: &str) -> Option<u32> {
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
        assert_eq!(current_context(&text), Some("coracle-12-ab34"));
        assert_eq!(job_of("coracle-12-ab34"), Some(12));
        assert_eq!(job_of("seed"), None);
    }
}
