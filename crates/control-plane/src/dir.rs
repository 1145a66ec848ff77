//! The control plane's directory: a tmpfs over `/tmp` in a private mount namespace. The kernel frees it with the
//! last process in that namespace. etcd's data may be on disk, and is then bound into it.
//!
//! Other processes of the same user, and only of that user, reach it below `/proc/PID/root`; see [`ControlPlaneDirOfPid`].

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::private_file::{create_private_dir, write_private};
use crate::protocol::ClusterConfig;
use crate::storage::{ClusterStorage, StorageDir};

/// The mount point. `/tmp` exists everywhere, and no process in the namespace needs the host's.
const MOUNT_POINT: &str = "/tmp";
/// The file with the administrator's kubeconfig.
const KUBECONFIG: &str = "kubeconfig";
/// The directory with the upstream programs.
const PROGRAMS: &str = "programs";
/// The directory with the workload, if it was copied to this node.
const WORKLOAD: &str = "workload";
/// The directory with the components' logs.
const LOGS: &str = "logs";
/// etcd's data directory.
const STORE: &str = "store";
/// The size limit of the tmpfs: more than etcd's limit of 2 GiB and its log. Memory is used only as it fills.
const MAX_STORE_BYTES: u64 = 4 << 30;
/// The wait for a control plane that still uses the storage on disk. One that was killed ends within this time.
const STORAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// The control plane's directory, with paths as its own processes see them.
#[derive(Debug, Clone)]
pub struct ControlPlaneDir {
    root: PathBuf,
    /// The storage on disk, locked as long as the control plane runs.
    _storage: Option<Arc<StorageDir>>,
}

impl ControlPlaneDir {
    /// Mounts the tmpfs, and bind-mounts the files and directories of the configuration into it. Their sources may be
    /// below the directory that the tmpfs covers. Programs and workload are bound file by file, so they stay
    /// accessible after their names are removed outside; the seed and the logs are bound as directories.
    pub fn mount(config: &ClusterConfig) -> io::Result<Self> {
        let mut cp_dir = Self::at(MOUNT_POINT);
        let storage = match &config.storage {
            ClusterStorage::Memory => None,
            ClusterStorage::Disk(path) => Some(StorageDir::open(path, STORAGE_TIMEOUT)?),
        };
        let open = |dir: Option<&PathBuf>| dir.map(|dir| open_dir(dir)).transpose();
        let (seed, logs) = (open(config.seed.as_ref())?, open(config.log_dir.as_ref())?);
        let (release, workload) = (
            open(Some(&config.release))?,
            open(config.workload.as_ref())?,
        );
        linux::mount::tmpfs(&cp_dir.root, MAX_STORE_BYTES)?;
        for dir in [cp_dir.pki(), cp_dir.seed(), cp_dir.logs(), cp_dir.store()] {
            create_private_dir(&dir)?;
        }
        if let Some(storage) = storage {
            linux::mount::bind(&path_of(&storage.etcd), &cp_dir.store())?;
            cp_dir._storage = Some(Arc::new(storage));
        }
        for (source, target) in [(seed, cp_dir.seed()), (logs, cp_dir.logs())] {
            if let Some(source) = source {
                linux::mount::bind(&path_of(&source), &target)?;
            }
        }
        if let Some(release) = release {
            bind_files(&path_of(&release), &cp_dir.programs(), BindDepth::FilesOnly)?;
        }
        if let Some(workload) = workload {
            bind_files(
                &path_of(&workload),
                &cp_dir.workload(),
                BindDepth::Recursive,
            )?;
        }
        std::env::set_current_dir(&cp_dir.root)?;
        Ok(cp_dir)
    }

    /// The same layout at another path, for tests.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            _storage: None,
        }
    }

    /// Writes the files of the configuration, readable only by the user.
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

    /// A file of [`ControlPlaneDir::pki`], as a flag's value.
    pub fn pki_file(&self, name: &str) -> String {
        self.pki().join(name).display().to_string()
    }

    /// The directory with the upstream programs.
    pub fn programs(&self) -> PathBuf {
        self.root.join(PROGRAMS)
    }

    /// The directory with the workload, if it was copied to this node.
    pub fn workload(&self) -> PathBuf {
        self.root.join(WORKLOAD)
    }

    /// The seed: an etcd data directory to start from, if there is one.
    pub fn seed(&self) -> PathBuf {
        self.root.join("seed")
    }

    /// The directory with the components' logs.
    pub fn logs(&self) -> PathBuf {
        self.root.join(LOGS)
    }

    /// etcd's data directory.
    pub fn store(&self) -> PathBuf {
        self.root.join(STORE)
    }

    /// The socket on which etcd serves clients.
    pub fn store_socket(&self) -> PathBuf {
        self.root.join("store.sock")
    }

    /// The socket of the egress proxy, through which the API server reaches nodes, pods and services.
    pub fn egress_socket(&self) -> PathBuf {
        self.root.join("egress.sock")
    }
}

/// The control plane's directory as other processes of the same user see it, by the pid of one of its processes.
#[derive(Debug, Clone)]
pub struct ControlPlaneDirOfPid(PathBuf);

impl ControlPlaneDirOfPid {
    /// The directory of the control plane that process `pid` belongs to.
    pub fn new(pid: u32) -> Self {
        Self(PathBuf::from(format!("/proc/{pid}/root{MOUNT_POINT}")))
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.0.join(KUBECONFIG)
    }

    /// The directory with the upstream programs.
    pub fn programs(&self) -> PathBuf {
        self.0.join(PROGRAMS)
    }

    /// The directory with the workload, if it was copied to this node.
    pub fn workload(&self) -> PathBuf {
        self.0.join(WORKLOAD)
    }

    /// etcd's data directory.
    pub fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// The directory with the components' logs.
    pub fn logs(&self) -> PathBuf {
        self.0.join(LOGS)
    }

    /// A directory for caches, removed with the cluster.
    pub fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }
}

/// The files of a directory that [`bind_files`] binds.
#[derive(Clone, Copy, PartialEq)]
enum BindDepth {
    /// Only its own files.
    FilesOnly,
    /// Files of subdirectories too.
    Recursive,
}

/// Creates `target` and bind-mounts the files of `source` into it one by one: a bound file stays until it is unmounted,
/// even if its name is removed in `source`.
fn bind_files(source: &Path, target: &Path, depth: BindDepth) -> io::Result<()> {
    create_private_dir(target)?;
    for entry in std::fs::read_dir(source)? {
        let entry = entry?;
        let (from, to) = (entry.path(), target.join(entry.file_name()));
        let link = std::fs::read_link(&from).ok();
        if let Some(link) = link.filter(|link| link.components().count() == 1) {
            // A link within the directory: another name of a multi-call program.
            std::os::unix::fs::symlink(link, &to)?;
        } else if from.is_file() {
            File::create_new(&to)?;
            linux::mount::bind(&from, &to)?;
        } else if from.is_dir() && depth == BindDepth::Recursive {
            bind_files(&from, &to, depth)?;
        }
    }
    Ok(())
}

/// A path to an open directory that later mounts do not cover.
fn path_of(dir: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

fn open_dir(path: &Path) -> io::Result<File> {
    File::open(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
