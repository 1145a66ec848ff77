//! The control plane's own place: a file system in memory, mounted over `/tmp` of a mount namespace
//! that nobody else is in. It disappears with the last process in it.
//!
//! From outside, the same user (and nobody else) sees it below `/proc/PID/root`; see
//! [`outside`].

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::protocol::ClusterConfig;

/// Where it is mounted. `/tmp` exists everywhere, and nothing in the namespace needs the host's.
const MOUNT_POINT: &str = "/tmp";
/// The file with the administrator's kubeconfig.
const KUBECONFIG: &str = "kubeconfig";
/// The directory with the upstream programs.
const PROGRAMS: &str = "programs";
/// The store's directory.
const STORE: &str = "store";
/// More than the store's own limit of 2 GiB with its log; memory is used only as it fills.
const MAX_BYTES: u64 = 4 << 30;

/// The paths inside the place.
#[derive(Debug, Clone)]
pub struct Home {
    root: PathBuf,
}

impl Home {
    /// Mounts it and makes visible in it what the configuration names, wherever that was: also below
    /// the directory that it covers.
    pub fn mount(config: &ClusterConfig) -> io::Result<Self> {
        let home = Self::at(MOUNT_POINT);
        let wanted = [
            (Some(&config.release), home.programs()),
            (config.seed.as_ref(), home.seed()),
            (config.log_dir.as_ref(), home.logs()),
        ];
        let mut visible = Vec::new();
        for (source, target) in wanted {
            let source = source.map(|source| open_dir(source)).transpose()?;
            visible.push((source, target));
        }
        linux::mount::tmpfs(&home.root, MAX_BYTES)?;
        DirBuilder::new().mode(0o700).create(home.pki())?;
        for (source, target) in visible {
            DirBuilder::new().mode(0o700).create(&target)?;
            if let Some(source) = source {
                let source = format!("/proc/self/fd/{}", source.as_raw_fd());
                linux::mount::bind(Path::new(&source), &target)?;
            }
        }
        std::env::set_current_dir(&home.root)?;
        Ok(home)
    }

    /// The same paths elsewhere, for tests.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Writes every file of the configuration, readable by the user only.
    pub fn write(&self, config: &ClusterConfig) -> io::Result<()> {
        for (name, content) in &config.files {
            write_private(&self.pki().join(name), content)?;
        }
        write_private(&self.root.join(KUBECONFIG), &config.admin_kubeconfig)
    }

    /// The directory with certificates, keys and component kubeconfigs.
    pub fn pki(&self) -> PathBuf {
        self.root.join("pki")
    }

    /// A file of [`Home::pki`], as a flag's value.
    pub fn pki_file(&self, name: &str) -> String {
        self.pki().join(name).display().to_string()
    }

    /// The directory with the upstream programs.
    pub fn programs(&self) -> PathBuf {
        self.root.join(PROGRAMS)
    }

    /// The store to start from, if there is one.
    pub fn seed(&self) -> PathBuf {
        self.root.join("seed")
    }

    /// The directory with the components' logs.
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// The store's directory.
    pub fn store(&self) -> PathBuf {
        self.root.join(STORE)
    }

    /// The store's socket, the only way to it.
    pub fn store_socket(&self) -> PathBuf {
        self.root.join("store.sock")
    }

    /// The socket of the proxy through which the API server reaches nodes, pods and services.
    pub fn egress_socket(&self) -> PathBuf {
        self.root.join("egress.sock")
    }
}

/// The place as the same user's other processes see it, given the id of a process in it.
#[derive(Debug, Clone)]
pub struct Outside(PathBuf);

/// See [`Outside`].
pub fn outside(pid: u32) -> Outside {
    Outside(PathBuf::from(format!("/proc/{pid}/root{MOUNT_POINT}")))
}

impl Outside {
    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.0.join(KUBECONFIG)
    }

    /// The directory with the upstream programs.
    pub fn programs(&self) -> PathBuf {
        self.0.join(PROGRAMS)
    }

    /// The store's directory.
    pub fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// A directory for caches that vanish with the cluster.
    pub fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }
}

fn open_dir(path: &Path) -> io::Result<File> {
    File::open(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

fn write_private(path: &Path, content: &str) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?
        .write_all(content.as_bytes())
}
