//! Imports a release from programs on this host.
//!
//! The programs are copied first, and the copies are run to read their versions: so the check covers the installed files, and detects a
//! `noexec` file system.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use indicatif::HumanBytes;
use linux::file_id::FileId;

use crate::elf::{ProgramCheckError, check_program};
use crate::release::{Release, ReleaseComponent};
use crate::store::{ReleaseStore, ReleaseStoreError, StagedRelease};
use crate::version::{ReleaseVersion, VersionError};
use crate::version_probe::{self, VersionProbeError};
use console::print_stderr;

/// The multi-call program of all components that `kubernetes/build` makes.
const MULTI_CALL: &str = "kube";

/// The parameters of `coracle kubernetes import`.
#[derive(Debug)]
pub struct ImportOptions {
    /// The directory that holds the programs, or links to one multi-call program `kube`.
    pub dir: PathBuf,
    /// Their version; by default that of kube-apiserver.
    pub version: Option<String>,
    /// A root other than the user's own.
    pub into: Option<PathBuf>,
    /// Replace an installed release.
    pub force: bool,
}

/// A release cannot be imported; nothing was installed.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Invalid `--version`.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The directory cannot be read.
    #[error("cannot read the directory {}", .dir.display())]
    Unreadable {
        /// As given by the user.
        dir: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Some programs are missing.
    #[error("{} has no {}", .dir.display(), .missing.iter().map(|c| c.name()).collect::<Vec<_>>().join(", "))]
    Missing {
        /// As given by the user.
        dir: PathBuf,
        /// The missing programs.
        missing: Vec<ReleaseComponent>,
    },
    /// A file is not a program for this host.
    #[error("{} cannot be used: {reason}", .path.display())]
    NotProgram {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: ProgramCheckError,
    },
    /// A program is not the component that its file name claims.
    #[error("{} does not seem to be {component}: {reason}", .path.display())]
    NotComponent {
        /// The file.
        path: PathBuf,
        /// The expected component.
        component: ReleaseComponent,
        /// The reason.
        reason: VersionProbeError,
    },
    /// A build from source without a version stamp.
    #[error("{} was built without a version: it reports {version}", .path.display())]
    Unstamped {
        /// The file.
        path: PathBuf,
        /// The version that it reports.
        version: ReleaseVersion,
    },
    /// The release cannot be stored.
    #[error(transparent)]
    Store(#[from] ReleaseStoreError),
}

impl ImportError {
    /// A hint for the user.
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
                reason: VersionProbeError::NotVersion { .. },
                ..
            } => {
                "`file PATH` shows its type; official programs are at https://dl.k8s.io and \
                 https://github.com/etcd-io/etcd/releases"
            }
            Self::NotComponent {
                reason: VersionProbeError::Run(_),
                ..
            } => {
                "if the file system that it was copied to forbids running programs (noexec), choose another with `--into DIR`"
            }
            Self::NotComponent {
                reason: VersionProbeError::TimedOut(_),
                ..
            } => "run it by hand with --version; if the file system is slow now, try again",
            Self::Unstamped { .. } => "name its version with `--version V`",
        };
        Some(text.to_owned())
    }
}

/// Copies, checks and installs a release. The flag is set if it was installed already.
pub async fn import(options: &ImportOptions) -> Result<(Release, bool), ImportError> {
    let given_version: Option<ReleaseVersion> =
        options.version.as_deref().map(str::parse).transpose()?;
    let programs = find_programs(&options.dir)?;
    for program in &programs {
        check_program(&program.path).map_err(|reason| ImportError::NotProgram {
            path: program.path.clone(),
            reason,
        })?;
    }
    let store = ReleaseStore::open(options.into.as_deref())?;
    if let Some(release) = given_version
        .as_ref()
        .and_then(|version| store.installed(version))
        .filter(|_| !options.force)
    {
        return Ok((release, true));
    }
    let staging = store.staging()?;
    copy(&programs, &staging)?;
    let (kubernetes, etcd) = check_versions(&options.dir, &staging, given_version.as_ref()).await?;
    let version = given_version.unwrap_or(kubernetes);
    if let Some(release) = store.installed(&version).filter(|_| !options.force) {
        return Ok((release, true));
    }
    let from = fs::canonicalize(&options.dir).unwrap_or_else(|_| options.dir.clone());
    let about = format!(
        "kubernetes {version}\netcd {etcd}\nfrom {}\n",
        from.display()
    );
    Ok((store.publish(staging, &version, &about)?, false))
}

/// A file and the components that it implements.
#[derive(Debug)]
struct ImportedProgram {
    path: PathBuf,
    size: u64,
    components: Vec<ReleaseComponent>,
}

impl ImportedProgram {
    /// The name of the copy.
    fn name(&self) -> &'static str {
        match self.components.as_slice() {
            [only] => only.name(),
            _ => MULTI_CALL,
        }
    }
}

/// The programs in a directory; files with several names appear once.
fn find_programs(dir: &Path) -> Result<Vec<ImportedProgram>, ImportError> {
    fs::read_dir(dir).map_err(|source| ImportError::Unreadable {
        dir: dir.to_path_buf(),
        source,
    })?;
    let mut programs: Vec<ImportedProgram> = Vec::new();
    let mut seen: HashMap<FileId, usize> = HashMap::new();
    let mut missing = Vec::new();
    for component in ReleaseComponent::ALL {
        let named = [component.name(), MULTI_CALL].map(|name| dir.join(name));
        let existing = named
            .into_iter()
            .find_map(|path| Some((fs::metadata(&path).ok()?, path)));
        let Some((metadata, path)) = existing else {
            missing.push(component);
            continue;
        };
        if !metadata.is_file() {
            return Err(ImportError::NotProgram {
                path,
                reason: ProgramCheckError::NotElf,
            });
        }
        let index = *seen.entry(FileId::from(&metadata)).or_insert_with(|| {
            programs.push(ImportedProgram {
                path,
                size: metadata.len(),
                components: Vec::new(),
            });
            programs.len() - 1
        });
        programs[index].components.push(component);
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

/// Copies each file once, and links its other names to it.
fn copy(programs: &[ImportedProgram], staging: &StagedRelease) -> Result<(), ReleaseStoreError> {
    let mut remaining: u64 = programs.iter().map(|program| program.size).sum();
    let mut names: Vec<&str> = Vec::new();
    for program in programs {
        // A second multi-call program is named after its first component.
        let name = match program.name() {
            name if names.contains(&name) => program.components[0].name(),
            name => name,
        };
        names.push(name);
        print_stderr(format_args!(
            "copying {} ({})",
            program.path.display(),
            HumanBytes(program.size)
        ));
        let to = staging.path().join(name);
        let failed = |e| ReleaseStoreError::writing("copy to", &to, Some(remaining), e);
        fs::copy(&program.path, &to).map_err(failed)?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).map_err(failed)?;
        for component in program
            .components
            .iter()
            .filter(|component| component.name() != name)
        {
            symlink(name, staging.path().join(component.name())).map_err(failed)?;
        }
        remaining = remaining.saturating_sub(program.size);
    }
    Ok(())
}

/// Runs every component. Returns the versions of the API server, which is the release's, and of etcd.
async fn check_versions(
    dir: &Path,
    staging: &StagedRelease,
    given_version: Option<&ReleaseVersion>,
) -> Result<(ReleaseVersion, ReleaseVersion), ImportError> {
    let probe = async |component: ReleaseComponent| {
        let path = dir.join(component.name());
        let version = version_probe::version_of(
            component,
            &staging.path().join(component.name()),
            version_probe::VERSION_TIMEOUT,
        )
        .await;
        version.map_err(|reason| ImportError::NotComponent {
            path,
            component,
            reason,
        })
    };
    let kubernetes = probe(ReleaseComponent::ApiServer).await?;
    if given_version.is_none() && kubernetes.is_unstamped() {
        return Err(ImportError::Unstamped {
            path: dir.join(ReleaseComponent::ApiServer.name()),
            version: kubernetes,
        });
    }
    let warn_unless_expected = |component: ReleaseComponent, version: &ReleaseVersion| {
        let expected = given_version.unwrap_or(&kubernetes);
        if version != expected {
            print_stderr(format_args!(
                "warning: {component} reports version {version}, in a release of {expected}"
            ));
        }
    };
    warn_unless_expected(ReleaseComponent::ApiServer, &kubernetes);
    for component in [
        ReleaseComponent::ControllerManager,
        ReleaseComponent::Scheduler,
        ReleaseComponent::Kubectl,
    ] {
        warn_unless_expected(component, &probe(component).await?);
    }
    let etcd = probe(ReleaseComponent::Etcd).await?;
    Ok((kubernetes, etcd))
}
