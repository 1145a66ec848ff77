//! Collects facts about this host: probes in child processes, files, and Slurm's commands. [`super::findings`] evaluates them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use linux::probe::host::{self, CgroupInfo, FileSystemInfo, Kernel};
use linux::probe::subid::{self, SetuidHelper, SubordinateIds};
use slurm::{Allocation, Partition, Slurm, SlurmError};

use crate::roles::probe;
use crate::snapshotter;

/// The sysctls that can restrict user namespaces; which of them exist depends on the distribution.
pub const SYSCTLS: &[&str] = &[
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
    "bridge",
];

/// A directory and the file system under it.
#[derive(Debug, Clone)]
pub struct SurveyedDir {
    /// Its origin: an environment variable, or a description.
    pub source: &'static str,
    /// Its path.
    pub path: PathBuf,
    /// Its file system, or the error message.
    pub file_system: Result<FileSystemInfo, String>,
    /// Whether a probe could create a file in it.
    pub writable: bool,
}

/// The results of Slurm's commands.
#[derive(Debug)]
pub struct SlurmSurvey {
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
    /// The values of [`SYSCTLS`] that this kernel has.
    pub sysctls: BTreeMap<&'static str, String>,
    /// Subordinate ids.
    pub ranges: SubordinateIds,
    /// The program that maps user ids.
    pub newuidmap: SetuidHelper,
    /// The program that maps group ids.
    pub newgidmap: SetuidHelper,
    /// This process' cgroup v2.
    pub cgroup: Option<CgroupInfo>,
    /// The `hidepid` option of `/proc`.
    pub hidepid: Option<String>,
    pub home: Option<SurveyedDir>,
    /// The directory that holds this program.
    pub program: Option<SurveyedDir>,
    /// Candidates for local storage, in order of preference.
    pub scratch: Vec<SurveyedDir>,
    /// Whether overlayfs works on the first writable directory of `scratch`.
    pub overlay_on_scratch: Option<Result<String, String>>,
    /// fuse-overlayfs, if it is on PATH.
    pub fuse_overlayfs: Option<PathBuf>,
    /// The user's choice of a snapshotter (`CORACLE_ROOTFS`).
    pub snapshotter_choice: Option<String>,
    /// The results of Slurm's commands.
    pub slurm: SlurmSurvey,
}

/// Collects all facts.
pub async fn collect() -> Survey {
    let scratch = scratch_candidates();
    let (probes, overlay_on_scratch, slurm) =
        futures::join!(run_probes(), overlay_on(&scratch), survey_slurm());
    let uid = rustix::process::getuid().as_raw();
    Survey {
        host: rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        user: subid::user_name(uid).unwrap_or_else(|| format!("uid {uid}")),
        kernel: host::kernel(),
        probes,
        sysctls: SYSCTLS
            .iter()
            .filter_map(|&name| Some((name, host::sysctl(name)?)))
            .collect(),
        ranges: subid::lookup(uid),
        newuidmap: subid::find_helper("newuidmap"),
        newgidmap: subid::find_helper("newgidmap"),
        cgroup: host::cgroup(),
        hidepid: host::hidepid(),
        home: std::env::var_os("HOME").map(|home| directory("HOME", home.into())),
        program: std::env::current_exe()
            .ok()
            .and_then(|exe| Some(directory("this program", exe.parent()?.to_owned()))),
        scratch,
        overlay_on_scratch,
        fuse_overlayfs: snapshotter::fuse_overlayfs(),
        snapshotter_choice: std::env::var(snapshotter::VARIABLE)
            .ok()
            .filter(|choice| !choice.is_empty()),
        slurm,
    }
}

/// Candidates for local storage. Slurm's and the site's variables come before `/tmp`.
fn scratch_candidates() -> Vec<SurveyedDir> {
    let named = ["SLURM_TMPDIR", "TMPDIR"];
    let mut candidates: Vec<SurveyedDir> = named
        .into_iter()
        .filter_map(|name| Some((name, std::env::var_os(name).filter(|v| !v.is_empty())?)))
        .map(|(name, path)| directory(name, path.into()))
        .collect();
    if !candidates.iter().any(|dir| dir.path == Path::new("/tmp")) {
        candidates.push(directory("/tmp", "/tmp".into()));
    }
    candidates
}

fn directory(source: &'static str, path: PathBuf) -> SurveyedDir {
    let file_system = host::file_system(&path).map_err(|error| error.to_string());
    let writable = file_system.is_ok() && host::is_writable(&path);
    SurveyedDir {
        source,
        path,
        file_system,
        writable,
    }
}

async fn run_probes() -> BTreeMap<&'static str, Result<String, String>> {
    let results = PROBES
        .iter()
        .map(|&name| async move { (name, probe::run_process(name).await) });
    futures::future::join_all(results)
        .await
        .into_iter()
        .collect()
}

async fn overlay_on(candidates: &[SurveyedDir]) -> Option<Result<String, String>> {
    let dir = candidates.iter().find(|dir| dir.writable)?;
    Some(probe::overlayfs_in(&dir.path).await)
}

async fn survey_slurm() -> SlurmSurvey {
    let allocation = Allocation::from_process_env().ok().flatten();
    let mut survey = SlurmSurvey {
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
                survey.partitions = slurm.partitions().await.unwrap_or_default();
            }
            survey.version = Some(version);
            survey.controller = Some(controller);
            survey.commands = Ok(slurm.srun);
        }
        Err(error) => survey.commands = Err(error),
    }
    survey
}
