//! Access to a running cluster from any host of the user: its kubeconfig, kept in memory, and kubectl.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use console::{Failure, FailureCode};
use kube::config::Kubeconfig;
use releases::{Release, ReleaseComponent};
use rustix::fs::MemfdFlags;

use super::{ClusterSelector, LocalCluster, StepOutput, find_here, run_on_leader_node};

/// kubectl's caches of clusters that were not used for this long are removed.
const CACHE_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// A cluster's name and kubeconfig.
pub struct ClusterAccess {
    /// The cluster's name.
    pub name: String,
    /// The administrator's kubeconfig. Secret.
    pub kubeconfig: String,
}

impl ClusterAccess {
    /// Finds the selected cluster, on this host or on others.
    pub async fn find(selector: &ClusterSelector) -> anyhow::Result<Self> {
        if let Some(cluster) = find_here(selector)? {
            return Self::of(&cluster);
        }
        let output = run_on_leader_node(selector, "kubeconfig", &[], StepOutput::Captured).await?;
        if output.code != 0 {
            // The step has printed why.
            return Err(Failure::new(
                FailureCode::NoWorkload,
                "cannot get the cluster's kubeconfig from its first node",
            )
            .into());
        }
        Self::parse(&String::from_utf8_lossy(&output.stdout))
    }

    /// The access to a cluster on this host.
    pub fn of(cluster: &LocalCluster) -> anyhow::Result<Self> {
        let path = cluster.kubeconfig();
        let text = std::fs::read_to_string(&path);
        Self::parse(&text.with_context(|| format!("cannot read {}", path.display()))?)
    }

    /// Reduces the text to names, server and keys. Its author is not verified, and kubeconfigs can name programs to execute and files
    /// to send.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let config = Kubeconfig::from_yaml(text).context("cannot read the cluster's kubeconfig")?;
        let name = config.current_context.clone().unwrap_or_default();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        anyhow::ensure!(
            !name.is_empty() && name.chars().all(is_plain),
            "the kubeconfig has an invalid cluster name, {name:?}"
        );
        let mut config = keep_server_and_keys(config);
        config.api_version = Some("v1".to_owned());
        config.kind = Some("Config".to_owned());
        // JSON is also YAML.
        let kubeconfig = serde_json::to_string_pretty(&config)? + "\n";
        Ok(Self { name, kubeconfig })
    }

    /// A client of the cluster's API server.
    pub async fn connect(&self) -> anyhow::Result<kube::Client> {
        cluster::client::from_kubeconfig(Kubeconfig::from_yaml(&self.kubeconfig)?).await
    }

    /// The variables with which kubectl uses this cluster, for this process and its children. The kubeconfig is in the memory of
    /// this process, and open for as long as it runs or until it executes another program without this file.
    pub fn environment(&self, kubectl: &Path) -> anyhow::Result<Vec<(&'static str, OsString)>> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs =
            (kubectl.parent().map(Path::to_owned).into_iter()).chain(std::env::split_paths(&path));
        let mut variables = vec![
            (
                "KUBECONFIG",
                memory_file("kubeconfig", &self.kubeconfig)?.into(),
            ),
            ("PATH", std::env::join_paths(dirs)?),
            (super::NAME_VARIABLE, self.name.clone().into()),
        ];
        if let Some(cache) = cache_dir(&self.name) {
            variables.push(("KUBECACHEDIR", cache.into()));
        }
        Ok(variables)
    }
}

fn keep_server_and_keys(kubeconfig: Kubeconfig) -> Kubeconfig {
    let mut kept = Kubeconfig {
        current_context: kubeconfig.current_context,
        contexts: kubeconfig.contexts,
        clusters: kubeconfig.clusters,
        auth_infos: kubeconfig.auth_infos,
        ..Kubeconfig::default()
    };
    for cluster in (kept.clusters.iter_mut()).flat_map(|named| &mut named.cluster) {
        *cluster = kube::config::Cluster {
            server: cluster.server.take(),
            certificate_authority_data: cluster.certificate_authority_data.take(),
            ..Default::default()
        };
    }
    for user in (kept.auth_infos.iter_mut()).flat_map(|named| &mut named.auth_info) {
        *user = kube::config::AuthInfo {
            client_certificate_data: user.client_certificate_data.take(),
            client_key_data: user.client_key_data.take(),
            ..Default::default()
        };
    }
    kept
}

/// Writes a text to a file in memory that children and programs executed by this process can open. Returns its path. Other users
/// cannot open it.
pub fn memory_file(name: &str, text: &str) -> io::Result<PathBuf> {
    let file: OwnedFd = rustix::fs::memfd_create(name, MemfdFlags::empty())?;
    let mut file = File::from(file);
    file.write_all(text.as_bytes())?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    // It stays open until this process ends.
    std::mem::forget(file);
    Ok(path.into())
}

/// kubectl of the installed release, or else of PATH.
pub fn find_kubectl() -> anyhow::Result<PathBuf> {
    let error = match Release::find(None) {
        Ok(release) => return Ok(release.component(ReleaseComponent::Kubectl)),
        Err(error) => error,
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    slurm::on_path("kubectl", &path).ok_or_else(|| {
        Failure::new(FailureCode::NoKubernetes, "no kubectl found")
            .with_source(error)
            .with_hint("`coracle kubernetes fetch` installs a release of Kubernetes with kubectl")
            .into()
    })
}

/// The directory of kubectl's caches for a cluster. kubectl's own is shared by all clusters at the same address, also by later ones.
fn cache_dir(cluster: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let root = cache.filter(|dir| dir.is_absolute()).or_else(home)?;
    let root = root.join("coracle/kubectl");
    remove_unused_caches(&root, SystemTime::now() - CACHE_LIFETIME);
    Some(root.join(cluster))
}

fn remove_unused_caches(root: &Path, used_before: SystemTime) {
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let modified = entry.metadata().and_then(|meta| meta.modified());
        if modified.is_ok_and(|time| time < used_before) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeconfig_cannot_name_programs_or_files() {
        let text = r#"{"current-context": "coracle-1-a",
            "contexts": [{"name": "coracle-1-a", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": "https://1.2.3.4:5", "certificate-authority": "/etc/passwd",
                "certificate-authority-data": "Y2E=", "proxy-url": "http://evil"}}],
            "users": [{"name": "u", "user": {"exec": {"apiVersion": "v1", "command": "/bin/evil"}, "tokenFile": "/etc/passwd",
                "client-certificate-data": "Y2VydA==", "client-key-data": "a2V5"}}]}"#;
        let access = ClusterAccess::parse(text).unwrap();
        assert_eq!(access.name, "coracle-1-a");
        for evil in ["evil", "passwd"] {
            assert!(!access.kubeconfig.contains(evil), "{}", access.kubeconfig);
        }
        for kept in ["https://1.2.3.4:5", "a2V5", "Y2E="] {
            assert!(access.kubeconfig.contains(kept), "{}", access.kubeconfig);
        }
        for bad in [text.replace("coracle-1-a", "a/b"), "{}".to_owned()] {
            assert!(ClusterAccess::parse(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_file_can_be_read_by_path() {
        let path = memory_file("test", "text").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "text");
    }

    #[test]
    fn only_unused_caches_are_removed() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("used/http")).unwrap();
        let now = SystemTime::now();
        remove_unused_caches(root.path(), now - CACHE_LIFETIME);
        assert!(root.path().join("used/http").exists());
        remove_unused_caches(root.path(), now + CACHE_LIFETIME);
        assert!(!root.path().join("used").exists());
    }
}
