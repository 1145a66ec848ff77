//! `coracle kubernetes import`: a release from programs that are on this machine already.
//!
//! They are copied first and asked for their version then, from where they will run: what is checked
//! is what is installed, and a file system that forbids running programs is noticed here.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::HumanBytes;
use linux::file_id::FileId;

use super::elf::{NotProgram, check_program};
use super::probe::{self, ProbeError};
use super::release::{Component, Release};
use super::store::{Staging, Store, StoreError};
use super::version::{Version, VersionError};
use crate::say::say;

/// A program that is all components at once, as `kubernetes/build` makes it.
const MULTI_CALL: &str = "kube";

/// Options of `coracle kubernetes import`.
#[derive(Debug, Args)]
#[command(disable_version_flag = true)]
pub struct ImportArgs {
    /// Where kube-apiserver, kube-controller-manager, kube-scheduler, etcd and kubectl are (or links
    /// with these names to one program `kube`)
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// Which version they are; by default kube-apiserver is asked
    #[arg(long, value_name = "V")]
    pub version: Option<String>,

    /// Install into this directory of releases instead of ~/.local/share/coracle/kubernetes
    #[arg(long, value_name = "DIR")]
    pub into: Option<PathBuf>,

    /// Replace this version if it is installed already
    #[arg(long)]
    pub force: bool,
}

/// A release can't be taken from a directory. Nothing has been installed then.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// `--version`.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The directory can't be read.
    #[error("can't read the directory {}", .dir.display())]
    Unreadable {
        /// As given.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Some programs are not there.
    #[error("{} has no {}", .dir.display(), .missing.iter().map(|c| c.name()).collect::<Vec<_>>().join(", "))]
    Missing {
        /// As given.
        dir: PathBuf,
        /// Which.
        missing: Vec<Component>,
    },
    /// A file is not a program of this machine.
    #[error("{} can't be used: {reason}", .path.display())]
    NotProgram {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: NotProgram,
    },
    /// A program is not the component whose name it has.
    #[error("{} doesn't seem to be {component}: {reason}", .path.display())]
    NotComponent {
        /// The file.
        path: PathBuf,
        /// What it should be.
        component: Component,
        /// Why.
        reason: ProbeError,
    },
    /// A build from source that wasn't told its version.
    #[error("{} was built without a version: it says {version}", .path.display())]
    Unstamped {
        /// The file.
        path: PathBuf,
        /// What it says.
        version: Version,
    },
    /// It can't be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ImportError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Version(error) => return error.hint(),
            Self::Store(error) => return error.hint(),
            Self::Unreadable { .. } | Self::Missing { .. } => {
                "the four programs of Kubernetes are in its kubernetes-server-linux-ARCH.tar.gz, in \
                 kubernetes/server/bin; etcd is in etcd-VERSION-linux-ARCH.tar.gz: put all five into one directory"
            }
            Self::NotProgram { .. }
            | Self::NotComponent {
                reason: ProbeError::Strange { .. },
                ..
            } => {
                "`file PATH` tells what it is; official programs are at https://dl.k8s.io and \
                 https://github.com/etcd-io/etcd/releases"
            }
            Self::NotComponent {
                reason: ProbeError::Run(_),
                ..
            } => {
                "if the file system that it was copied to forbids running programs (noexec), choose another with `--into DIR`"
            }
            Self::NotComponent {
                reason: ProbeError::Silent(_),
                ..
            } => "run it by hand with --version; if the file system is slow now, try again",
            Self::Unstamped { .. } => "say which version it is with `--version V`",
        };
        Some(text.to_owned())
    }
}

/// Copies, checks and installs a release. Returns it, and whether it was there already.
pub async fn import(args: &ImportArgs) -> Result<(Release, bool), ImportError> {
    let given: Option<Version> = args.version.as_deref().map(str::parse).transpose()?;
    let programs = find_programs(&args.dir)?;
    for program in &programs {
        check_program(&program.path).map_err(|reason| ImportError::NotProgram {
            path: program.path.clone(),
            reason,
        })?;
    }
    let store = Store::open(args.into.as_deref())?;
    if let Some(release) = given
        .as_ref()
        .and_then(|version| store.installed(version))
        .filter(|_| !args.force)
    {
        return Ok((release, true));
    }
    let staging = store.staging()?;
    copy(&programs, &staging)?;
    let (kubernetes, etcd) = check_versions(&args.dir, &staging, given.as_ref()).await?;
    let version = given.unwrap_or(kubernetes);
    if let Some(release) = store.installed(&version).filter(|_| !args.force) {
        return Ok((release, true));
    }
    let from = fs::canonicalize(&args.dir).unwrap_or_else(|_| args.dir.clone());
    let about = format!(
        "kubernetes {version}\netcd {etcd}\nfrom {}\n",
        from.display()
    );
    Ok((store.publish(staging, &version, &about)?, false))
}

/// A file, and the components that it is.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    size: u64,
    components: Vec<Component>,
}

impl Program {
    /// What the copy is called.
    fn name(&self) -> &'static str {
        match self.components.as_slice() {
            [only] => only.name(),
            _ => MULTI_CALL,
        }
    }
}

/// The programs of a directory, each file once however many names it has.
fn find_programs(dir: &Path) -> Result<Vec<Program>, ImportError> {
    fs::read_dir(dir).map_err(|source| ImportError::Unreadable {
        dir: dir.to_path_buf(),
        source,
    })?;
    let mut programs: Vec<Program> = Vec::new();
    let mut seen: HashMap<FileId, usize> = HashMap::new();
    let mut missing = Vec::new();
    for component in Component::ALL {
        let named = [component.name(), MULTI_CALL].map(|name| dir.join(name));
        let found = named
            .into_iter()
            .find_map(|path| Some((fs::metadata(&path).ok()?, path)));
        let Some((metadata, path)) = found else {
            missing.push(component);
            continue;
        };
        if !metadata.is_file() {
            return Err(ImportError::NotProgram {
                path,
                reason: NotProgram::NotElf,
            });
        }
        let at = *seen.entry(FileId::from(&metadata)).or_insert_with(|| {
            programs.push(Program {
                path,
                size: metadata.len(),
                components: Vec::new(),
            });
            programs.len() - 1
        });
        programs[at].components.push(component);
    }
    if missing.is_empty() {
        Ok(programs)
    } else {
        Err(ImportError::Missing {
            dir: dir.to_path_buf(),
            missing,
        })
    }
}

/// Copies every file once, with links where it has several names.
fn copy(programs: &[Program], staging: &Staging) -> Result<(), StoreError> {
    let mut left: u64 = programs.iter().map(|program| program.size).sum();
    let mut names: Vec<&str> = Vec::new();
    for program in programs {
        // Two multi-call programs in one release: the second goes by the name of its first component.
        let name = match program.name() {
            name if names.contains(&name) => program.components[0].name(),
            name => name,
        };
        names.push(name);
        say(format_args!(
            "copying {} ({})",
            program.path.display(),
            HumanBytes(program.size)
        ));
        let to = staging.path().join(name);
        let failed = |e| StoreError::writing("copy to", &to, Some(left), e);
        fs::copy(&program.path, &to).map_err(failed)?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).map_err(failed)?;
        for component in program
            .components
            .iter()
            .filter(|component| component.name() != name)
        {
            symlink(name, staging.path().join(component.name())).map_err(failed)?;
        }
        left = left.saturating_sub(program.size);
    }
    Ok(())
}

/// Asks every component. Returns the versions of the API server, which is what Kubernetes' version
/// is taken to be, and of etcd.
async fn check_versions(
    dir: &Path,
    staging: &Staging,
    given: Option<&Version>,
) -> Result<(Version, Version), ImportError> {
    let ask = async |component: Component| {
        let path = dir.join(component.name());
        let version = probe::version_of(
            component,
            &staging.path().join(component.name()),
            probe::PATIENCE,
        )
        .await;
        version.map_err(|reason| ImportError::NotComponent {
            path,
            component,
            reason,
        })
    };
    let kubernetes = ask(Component::ApiServer).await?;
    if given.is_none() && kubernetes.is_unstamped() {
        return Err(ImportError::Unstamped {
            path: dir.join(Component::ApiServer.name()),
            version: kubernetes,
        });
    }
    let warn_unless_expected = |component: Component, version: &Version| {
        let expected = given.unwrap_or(&kubernetes);
        if version != expected {
            say(format_args!(
                "warning: {component} says that it is {version}, in a release of {expected}"
            ));
        }
    };
    warn_unless_expected(Component::ApiServer, &kubernetes);
    for component in [
        Component::ControllerManager,
        Component::Scheduler,
        Component::Kubectl,
    ] {
        warn_unless_expected(component, &ask(component).await?);
    }
    let etcd = ask(Component::Etcd).await?;
    Ok((kubernetes, etcd))
}
