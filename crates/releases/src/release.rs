//! Finds an installed release of upstream.
//!
//! A *release* is a directory that holds the five [`ReleaseComponent`]s, usually `ROOT/v1.37.1`. A *root*
//! is a directory of releases. This module only reads directories; it neither runs programs nor writes files.

use std::env;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::version::ReleaseVersion;

/// A program of upstream that Coracle runs. Several may be links to one multi-call program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseComponent {
    /// `kube-apiserver`
    ApiServer,
    /// `kube-controller-manager`
    ControllerManager,
    /// `kube-scheduler`
    Scheduler,
    /// `etcd`
    Etcd,
    /// `kubectl`
    Kubectl,
}

impl ReleaseComponent {
    /// The components of a complete release.
    pub const ALL: [ReleaseComponent; 5] = [
        Self::ApiServer,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Etcd,
        Self::Kubectl,
    ];

    /// The file name, which a multi-call program recognizes too.
    pub fn name(self) -> &'static str {
        match self {
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Etcd => "etcd",
            Self::Kubectl => "kubectl",
        }
    }
}

impl fmt::Display for ReleaseComponent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A complete release of upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The directory that holds the components.
    pub dir: PathBuf,
    /// Its version, with the leading `v`.
    pub version: String,
}

impl Release {
    /// The release to use. If `wanted` (from `--kubernetes`) or `CORACLE_KUBERNETES` names a release or a root, the release there; else the
    /// newest release of the first default root that has one.
    pub fn find(wanted: Option<&Path>) -> Result<Release, ReleaseError> {
        ReleaseSearch::new(wanted).find()
    }

    /// The path of a component's program.
    pub fn component(&self, component: ReleaseComponent) -> PathBuf {
        self.dir.join(component.name())
    }

    /// Whether it is the multi-call program that `kubernetes/` builds. That has a few options more than upstream's programs (see
    /// kubernetes/main.go).
    pub fn is_our_build(&self) -> bool {
        self.dir.join("kube").is_file()
    }
}

/// There is no usable release.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// No default root contains a release.
    #[error("no Kubernetes is installed; searched {}", list_searched(.0))]
    NotFound(Vec<SearchedDir>),
    /// The directory that the user named contains no release.
    #[error("there is no Kubernetes release in {}", .0)]
    NotInDir(SearchedDir),
    /// The directory that the user named lacks some components.
    #[error("the Kubernetes in {} is incomplete: no executable {}", .dir.display(), names(.missing))]
    Incomplete {
        /// The directory.
        dir: PathBuf,
        /// The components that it lacks.
        missing: Vec<ReleaseComponent>,
    },
    /// The directory that the user named has no known version.
    #[error("the version of the Kubernetes release in {} is unknown", .0.display())]
    NoVersion(PathBuf),
}

impl ReleaseError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NotFound(_) => "`coracle kubernetes fetch` downloads the official release; without internet, \
                `coracle kubernetes import DIR` takes its programs from a directory"
                .to_owned(),
            Self::NotInDir(_) => "name a directory that holds kube-apiserver and the others, or one with such directories \
                named by version (v1.37.1); `coracle kubernetes ls` shows what is installed"
                .to_owned(),
            Self::Incomplete { .. } => {
                "`coracle kubernetes fetch` or `coracle kubernetes import DIR` installs a complete one".to_owned()
            }
            Self::NoVersion(dir) => format!("`coracle kubernetes import {}` finds out and installs it", dir.display()),
        })
    }
}

/// A directory that was searched without success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchedDir {
    /// The directory.
    pub dir: PathBuf,
    /// Its contents, if it exists.
    pub found: Option<String>,
}

impl fmt::Display for SearchedDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dir.display())?;
        self.found
            .as_ref()
            .map_or(Ok(()), |found| write!(f, " ({found})"))
    }
}

fn list_searched(dirs: &[SearchedDir]) -> String {
    dirs.iter()
        .map(SearchedDir::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

fn names(components: &[ReleaseComponent]) -> String {
    components
        .iter()
        .map(|component| component.name())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The root that `fetch` and `import` install into: `$XDG_DATA_HOME/coracle/kubernetes`. `None` if neither that variable nor HOME is set.
pub fn user_root() -> Option<PathBuf> {
    // The XDG specification says that relative paths are to be ignored.
    let absolute = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let data =
        absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    Some(data.join("coracle/kubernetes"))
}

/// The directories to search, in order.
#[derive(Debug)]
pub struct ReleaseSearch {
    wanted: Option<PathBuf>,
    roots: Vec<PathBuf>,
}

/// A directory with a release, complete or not.
#[derive(Debug, Clone)]
pub struct InstalledRelease {
    /// The directory.
    pub dir: PathBuf,
    /// From its VERSION file or its name.
    pub version: ReleaseVersion,
    /// The components that it lacks; empty for a complete release.
    pub missing: Vec<ReleaseComponent>,
}

impl ReleaseSearch {
    /// The directories that [`Release::find`] searches.
    pub fn new(wanted: Option<&Path>) -> ReleaseSearch {
        // An empty variable counts as unset.
        let from_env = env::var_os("CORACLE_KUBERNETES").filter(|value| !value.is_empty());
        let wanted = wanted.map(Path::to_owned).or(from_env.map(PathBuf::from));
        let wanted = wanted.as_deref();
        // The release that was installed with this program comes first.
        let beside = env::current_exe()
            .and_then(fs::canonicalize)
            .ok()
            .and_then(|exe| Some(exe.parent()?.parent()?.join("lib/coracle/kubernetes")));
        let system = [
            "/usr/local/lib/coracle/kubernetes",
            "/usr/lib/coracle/kubernetes",
        ]
        .map(PathBuf::from);
        let mut roots: Vec<PathBuf> = Vec::new();
        for root in beside.into_iter().chain(user_root()).chain(system) {
            if !roots.contains(&root) {
                roots.push(root);
            }
        }
        ReleaseSearch {
            wanted: wanted.map(Path::to_path_buf),
            roots,
        }
    }

    /// The release to use.
    pub fn find(&self) -> Result<Release, ReleaseError> {
        if let Some(wanted) = &self.wanted {
            return find_in(wanted);
        }
        let release = self
            .roots
            .iter()
            .find_map(|root| newest(&releases_in(root)));
        release.ok_or_else(|| {
            ReleaseError::NotFound(
                self.roots
                    .iter()
                    .map(|root| describe_searched(root))
                    .collect(),
            )
        })
    }

    /// All releases, complete or not: in search order, newest first.
    pub fn all(&self) -> Vec<InstalledRelease> {
        match &self.wanted {
            Some(wanted) => match version_of(wanted) {
                Some(version) => vec![InstalledRelease {
                    dir: wanted.clone(),
                    version,
                    missing: missing_components(wanted),
                }],
                None => releases_in(wanted),
            },
            None => self
                .roots
                .iter()
                .flat_map(|root| releases_in(root))
                .collect(),
        }
    }
}

fn find_in(wanted: &Path) -> Result<Release, ReleaseError> {
    let missing = missing_components(wanted);
    if missing.is_empty() {
        let version =
            version_of(wanted).ok_or_else(|| ReleaseError::NoVersion(wanted.to_path_buf()))?;
        return Ok(Release {
            dir: wanted.to_path_buf(),
            version: version.to_string(),
        });
    }
    if let Some(release) = newest(&releases_in(wanted)) {
        return Ok(release);
    }
    if missing.len() < ReleaseComponent::ALL.len() {
        return Err(ReleaseError::Incomplete {
            dir: wanted.to_path_buf(),
            missing,
        });
    }
    Err(ReleaseError::NotInDir(describe_searched(wanted)))
}

/// The components that `dir` lacks as executable files.
pub fn missing_components(dir: &Path) -> Vec<ReleaseComponent> {
    let is_executable = |component: &ReleaseComponent| {
        fs::metadata(dir.join(component.name()))
            .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    ReleaseComponent::ALL
        .into_iter()
        .filter(|component| !is_executable(component))
        .collect()
}

/// The subdirectories of a root that are named like a version, newest first.
fn releases_in(root: &Path) -> Vec<InstalledRelease> {
    let mut releases: Vec<InstalledRelease> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = entry.file_name().to_str()?.parse().ok()?;
            let dir = entry.path();
            dir.is_dir().then(|| InstalledRelease {
                version,
                missing: missing_components(&dir),
                dir,
            })
        })
        .collect();
    releases.sort_by(|a, b| b.version.cmp(&a.version));
    releases
}

fn newest(newest_first: &[InstalledRelease]) -> Option<Release> {
    let best = newest_first
        .iter()
        .find(|candidate| candidate.missing.is_empty())?;
    Some(Release {
        dir: best.dir.clone(),
        version: best.version.to_string(),
    })
}

/// The version of a release: from the line `kubernetes v1.37.1` of its file VERSION, else from its name.
fn version_of(dir: &Path) -> Option<ReleaseVersion> {
    let file = fs::read_to_string(dir.join("VERSION")).unwrap_or_default();
    let line = file
        .lines()
        .find_map(|line| line.strip_prefix("kubernetes ")?.trim().parse().ok());
    line.or_else(|| {
        fs::canonicalize(dir)
            .ok()?
            .file_name()?
            .to_str()?
            .parse()
            .ok()
    })
}

fn describe_searched(dir: &Path) -> SearchedDir {
    let found = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => Some(error.to_string()),
        Ok(_) => match releases_in(dir).first() {
            Some(newest) => Some(format!(
                "{} is incomplete: no executable {}",
                newest.version,
                names(&newest.missing)
            )),
            None => Some("it contains no release".to_owned()),
        },
    };
    SearchedDir {
        dir: dir.to_path_buf(),
        found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn install(dir: &Path, components: &[ReleaseComponent]) {
        fs::create_dir_all(dir).unwrap();
        for component in components {
            let path = dir.join(component.name());
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    fn search(roots: &[PathBuf]) -> ReleaseSearch {
        ReleaseSearch {
            wanted: None,
            roots: roots.to_vec(),
        }
    }

    #[test]
    fn newest_complete_version_of_a_root_wins() {
        let root = tempfile::tempdir().unwrap();
        for version in ["v1.37.9", "v1.37.10", "v1.38.0-rc.1", ".new-abc", "notes"] {
            install(&root.path().join(version), &ReleaseComponent::ALL);
        }
        install(&root.path().join("v1.39.0"), &ReleaseComponent::ALL[..4]);
        fs::write(root.path().join("v9.9.9"), "").unwrap();
        let search = search(&[root.path().to_path_buf()]);
        assert_eq!(search.find().unwrap().version, "v1.38.0-rc.1");
        fs::remove_dir_all(root.path().join("v1.38.0-rc.1")).unwrap();
        let release = search.find().unwrap();
        assert_eq!(release.version, "v1.37.10");
        assert_eq!(
            release.component(ReleaseComponent::Etcd),
            root.path().join("v1.37.10/etcd")
        );
        let all: Vec<_> = search
            .all()
            .iter()
            .map(|c| (c.version.to_string(), c.missing.len()))
            .collect();
        assert_eq!(
            all,
            [
                ("v1.39.0".into(), 1),
                ("v1.37.10".into(), 0),
                ("v1.37.9".into(), 0)
            ]
        );
    }

    #[test]
    fn first_root_with_a_release_wins() {
        let dir = tempfile::tempdir().unwrap();
        let roots = ["none", "broken", "first", "second"].map(|name| dir.path().join(name));
        install(&roots[1].join("v1.40.0"), &ReleaseComponent::ALL[1..]);
        install(&roots[2].join("v1.36.0"), &ReleaseComponent::ALL);
        install(&roots[3].join("v1.37.1"), &ReleaseComponent::ALL);
        assert_eq!(search(&roots).find().unwrap().dir, roots[2].join("v1.36.0"));
    }

    #[test]
    fn error_lists_searched_directories_and_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let roots = ["none", "broken", "empty"].map(|name| dir.path().join(name));
        install(&roots[1].join("v1.40.0"), &ReleaseComponent::ALL[2..]);
        install(&roots[2], &[]);
        let error = search(&roots).find().unwrap_err();
        let text = error
            .to_string()
            .replace(&*dir.path().to_string_lossy(), "");
        assert_eq!(
            text,
            "no Kubernetes is installed; searched /none, /broken (v1.40.0 is incomplete: no executable kube-apiserver, \
             kube-controller-manager), /empty (it contains no release)"
        );
        let hint = error.hint().unwrap();
        assert!(
            hint.contains("coracle kubernetes fetch") && hint.contains("import DIR"),
            "{hint}"
        );
    }

    #[test]
    fn wanted_is_a_root_or_a_release() {
        let dir = tempfile::tempdir().unwrap();
        let release = dir.path().join("v1.37.1");
        install(&release, &ReleaseComponent::ALL);
        let expected = Release {
            dir: release.clone(),
            version: "v1.37.1".into(),
        };
        assert_eq!(Release::find(Some(dir.path())).unwrap(), expected);
        assert_eq!(Release::find(Some(&release)).unwrap(), expected);
    }

    #[test]
    fn version_is_read_from_the_version_file() {
        let dir = tempfile::tempdir().unwrap();
        install(dir.path(), &ReleaseComponent::ALL);
        assert!(matches!(
            Release::find(Some(dir.path())),
            Err(ReleaseError::NoVersion(_))
        ));
        fs::write(
            dir.path().join("VERSION"),
            "kubernetes v1.37.1\netcd v3.7.0\nbuild 0123\n",
        )
        .unwrap();
        assert_eq!(Release::find(Some(dir.path())).unwrap().version, "v1.37.1");
    }

    #[test]
    fn wanted_directory_has_no_fallback() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            Release::find(Some(&dir.path().join("none"))),
            Err(ReleaseError::NotInDir(_))
        ));
        assert!(matches!(
            Release::find(Some(dir.path())),
            Err(ReleaseError::NotInDir(_))
        ));
        install(dir.path(), &ReleaseComponent::ALL[..3]);
        let error = Release::find(Some(dir.path())).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("is incomplete: no executable etcd, kubectl"),
            "{error}"
        );
    }

    #[test]
    fn unexecutable_files_are_missing_and_links_count() {
        let dir = tempfile::tempdir().unwrap();
        install(dir.path(), &ReleaseComponent::ALL[..4]);
        fs::set_permissions(dir.path().join("etcd"), fs::Permissions::from_mode(0o644)).unwrap();
        std::os::unix::fs::symlink("kube-apiserver", dir.path().join("kubectl")).unwrap();
        assert_eq!(missing_components(dir.path()), [ReleaseComponent::Etcd]);
        fs::remove_file(dir.path().join("kube-apiserver")).unwrap();
        assert_eq!(
            missing_components(dir.path()),
            [
                ReleaseComponent::ApiServer,
                ReleaseComponent::Etcd,
                ReleaseComponent::Kubectl
            ]
        );
    }
}
