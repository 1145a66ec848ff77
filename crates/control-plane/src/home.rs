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
/// The directory with the workload, if it was brought here.
const WORKLOAD: &str = "workload";
/// The directory with the components' logs.
const LOGS: &str = "logs";
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
    /// the directory that it covers. Programs and workload stay visible when their files are removed
    /// outside; the seed and the logs are the directories themselves.
    pub fn mount(config: &ClusterConfig) -> io::Result<Self> {
        let home = Self::at(MOUNT_POINT);
        let open = |dir: Option<&PathBuf>| dir.map(|dir| open_dir(dir)).transpose();
        let (seed, logs) = (open(config.seed.as_ref())?, open(config.log_dir.as_ref())?);
        let (release, workload) = (
            open(Some(&config.release))?,
            open(config.workload.as_ref())?,
        );
        linux::mount::tmpfs(&home.root, MAX_BYTES)?;
        for dir in [home.pki(), home.seed(), home.logs()] {
            make_dir(&dir)?;
        }
        for (source, target) in [(seed, home.seed()), (logs, home.logs())] {
            if let Some(source) = source {
                linux::mount::bind(&path_of(&source), &target)?;
            }
        }
        if let Some(release) = release {
            show_files(&path_of(&release), &home.programs(), Below::Nothing)?;
        }
        if let Some(workload) = workload {
            show_files(&path_of(&workload), &home.workload(), Below::All)?;
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

    /// The workload, if it was brought here.
    pub fn workload(&self) -> PathBuf {
        self.root.join(WORKLOAD)
    }

    /// The store to start from, if there is one.
    pub fn seed(&self) -> PathBuf {
        self.root.join("seed")
    }

    /// The directory with the components' logs.
    pub fn logs(&self) -> PathBuf {
        self.root.join(LOGS)
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

    /// The workload, if it was brought here.
    pub fn workload(&self) -> PathBuf {
        self.0.join(WORKLOAD)
    }

    /// The store's directory.
    pub fn store(&self) -> PathBuf {
        self.0.join(STORE)
    }

    /// The directory with the components' logs.
    pub fn logs(&self) -> PathBuf {
        self.0.join(LOGS)
    }

    /// A directory for caches that vanish with the cluster.
    pub fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }
}

/// What of a directory is shown.
#[derive(Clone, Copy, PartialEq)]
enum Below {
    /// Its own files.
    Nothing,
    /// Those of directories below it too.
    All,
}

/// Makes a new directory in which the files of another are seen, each by a mount of its own: a file that
/// is mounted stays until the mount goes, whoever removes its name elsewhere.
fn show_files(source: &Path, target: &Path, below: Below) -> io::Result<()> {
    make_dir(target)?;
    for entry in std::fs::read_dir(source)? {
        let entry = entry?;
        let (from, to) = (entry.path(), target.join(entry.file_name()));
        let link = std::fs::read_link(&from).ok();
        if let Some(link) = link.filter(|link| link.components().count() == 1) {
            // One program may have many names.
            std::os::unix::fs::symlink(link, &to)?;
        } else if from.is_file() {
            File::create_new(&to)?;
            linux::mount::bind(&from, &to)?;
        } else if from.is_dir() && below == Below::All {
            show_files(&from, &to, below)?;
        }
    }
    Ok(())
}

fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

/// An open directory as a path that mounts above it don't change.
fn path_of(dir: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
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
