//! Collects facts about this host: probes in child processes, files, and Slurm's commands. [`super::findings`] judges them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use linux::probe::host::{self, Cgroup, FileSystem, Kernel};
use linux::probe::subid::{self, Helper, Ranges};
use slurm::{Allocation, Partition, Slurm, SlurmError};

use crate::{probe, rootfs};

/// The sysctls that can restrict user namespaces; which of them exist depends on the distribution.
pub const SETTINGS: &[&str] = &[
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
];

/// The probes that need no argument.
const PROBES: &[&str] = &[
    "user-namespace",
    "process-namespace",
    "subordinate-ids",
    "fuse",
    "tun",
    "bridge",
    "nftables",
    "seccomp",
];

/// A directory and the file system under it.
#[derive(Debug, Clone)]
pub struct Directory {
    /// Its origin: an environment variable, or a description.
    pub source: &'static str,
    /// Its path.
    pub path: PathBuf,
    /// Its file system, or the error message.
    pub file_system: Result<FileSystem, String>,
    /// Whether a probe could create a file in it.
    pub writable: bool,
}

/// The results of Slurm's commands.
#[derive(Debug)]
pub struct SlurmAnswers {
    /// The path of `srun`, if all of Slurm's commands are installed.
    pub commands: Result<PathBuf, SlurmError>,
    /// The version of the commands.
    pub version: Option<Result<slurm::SlurmVersion, SlurmError>>,
    /// Whether the controller responds to `scontrol ping`.
    pub controller: Option<Result<(), SlurmError>>,
    /// The partitions; empty if the controller does not respond.
    pub partitions: Vec<Partition>,
    /// The job that this process runs in.
    pub job: Option<u32>,
}

/// All facts about a host.
#[derive(Debug)]
pub struct Survey {
    /// The host's name.
    pub host: String,
    /// The user's name in the host's user database.
    pub user: String,
    /// The running kernel.
    pub kernel: Kernel,
    /// The result of each probe, by its name.
    pub probes: BTreeMap<&'static str, Result<String, String>>,
    /// The values of [`SETTINGS`] that this kernel has.
    pub settings: BTreeMap<&'static str, String>,
    /// Subordinate ids.
    pub ranges: Ranges,
    /// The program that maps user ids.
    pub newuidmap: Helper,
    /// The program that maps group ids.
    pub newgidmap: Helper,
    /// This process' cgroup v2.
    pub cgroup: Option<Cgroup>,
    /// The `hidepid` option of `/proc`.
    pub hidepid: Option<String>,
    pub home: Option<Directory>,
    /// The directory that holds this program.
    pub program: Option<Directory>,
    /// Candidates for local storage, in order of preference.
    pub scratch: Vec<Directory>,
    /// Whether overlayfs works on the first writable directory of `scratch`.
    pub overlay_on_scratch: Option<Result<String, String>>,
    /// fuse-overlayfs, if it is on PATH.
    pub fuse_overlayfs: Option<PathBuf>,
    /// The user's choice of a stacking method (`CORACLE_ROOTFS`).
    pub wanted_stacking: Option<String>,
    /// The results of Slurm's commands.
    pub slurm: SlurmAnswers,
}

/// Collects all facts.
pub async fn take() -> Survey {
    let scratch = scratch_candidates();
    let (probes, overlay_on_scratch, slurm) =
        futures::join!(run_probes(), overlay_on(&scratch), ask_slurm());
    let uid = rustix::process::getuid().as_raw();
    Survey {
        host: rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        user: subid::user_name(uid).unwrap_or_else(|| format!("uid {uid}")),
        kernel: host::kernel(),
        probes,
        settings: SETTINGS
            .iter()
            .filter_map(|&name| Some((name, host::sysctl(name)?)))
            .collect(),
        ranges: subid::lookup(uid),
        newuidmap: subid::helper("newuidmap"),
        newgidmap: subid::helper("newgidmap"),
        cgroup: host::cgroup(),
        hidepid: host::hidepid(),
        home: std::env::var_os("HOME").map(|home| directory("HOME", home.into())),
        program: std::env::current_exe()
            .ok()
            .and_then(|exe| Some(directory("this program", exe.parent()?.to_owned()))),
        scratch,
        overlay_on_scratch,
        fuse_overlayfs: rootfs::fuse_overlayfs(),
        wanted_stacking: std::env::var(rootfs::VARIABLE)
            .ok()
            .filter(|wanted| !wanted.is_empty()),
        slurm,
    }
}

/// Candidates for local storage. Slurm's and the site's variables come before `/tmp`.
fn scratch_candidates() -> Vec<Directory> {
    let named = ["SLURM_TMPDIR", "TMPDIR"];
    let mut found: Vec<Directory> = named
        .into_iter()
        .filter_map(|name| Some((name, std::env::var_os(name).filter(|v| !v.is_empty())?)))
        .map(|(name, path)| directory(name, path.into()))
        .collect();
    if !found.iter().any(|dir| dir.path == Path::new("/tmp")) {
        found.push(directory("/tmp", "/tmp".into()));
    }
    found
}

fn directory(source: &'static str, path: PathBuf) -> Directory {
    let file_system = host::file_system(&path).map_err(|error| error.to_string());
    let writable = file_system.is_ok() && host::is_writable(&path);
    Directory {
        source,
        path,
        file_system,
        writable,
    }
}

async fn run_probes() -> BTreeMap<&'static str, Result<String, String>> {
    let answers = PROBES
        .iter()
        .map(|&name| async move { (name, probe::run(name).await) });
    futures::future::join_all(answers)
        .await
        .into_iter()
        .collect()
}

async fn overlay_on(candidates: &[Directory]) -> Option<Result<String, String>> {
    let dir = candidates.iter().find(|dir| dir.writable)?;
    Some(probe::overlay_in(&dir.path).await)
}

async fn ask_slurm() -> SlurmAnswers {
    let allocation = Allocation::from_process_env().ok().flatten();
    let mut answers = SlurmAnswers {
        commands: Err(SlurmError::NotInstalled {
            missing: Vec::new(),
        }),
        version: None,
        controller: None,
        partitions: Vec::new(),
        job: allocation.map(|allocation| allocation.job_id),
    };
    match Slurm::find() {
        Ok(slurm) => {
            let (version, controller) = futures::join!(slurm.version(), slurm.ping());
            if controller.is_ok() {
                answers.partitions = slurm.partitions().await.unwrap_or_default();
            }
            answers.version = Some(version);
            answers.controller = Some(controller);
            answers.commands = Ok(slurm.srun);
        }
        Err(error) => answers.commands = Err(error),
    }
    answers
}
