//! The workload of a cluster: a program or manifests.

use console::{Failure, FailureCode};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::running_clusters::NAME_VARIABLE;

/// A workload that exists and can be run.
#[derive(Debug, Clone, PartialEq)]
pub enum Workload {
    /// A program with its arguments.
    Program {
        /// The executable: for a script without execute permission, its interpreter.
        program: PathBuf,
        args: Vec<OsString>,
    },
    /// Manifests to apply.
    Manifests(Manifests),
}

/// The source of manifests.
#[derive(Debug, Clone, PartialEq)]
pub enum Manifests {
    /// A file.
    File(PathBuf),
    /// All manifests below a directory.
    Directory(PathBuf),
    /// Standard input.
    Stdin,
}

/// Limit on the depth of directories of manifests.
pub const MAX_DEPTH: u32 = 16;

impl Workload {
    /// Finds the workload and checks that it can be run.
    pub fn find(name: &OsStr, args: &[OsString]) -> Result<Self, Failure> {
        let path = Path::new(name);
        if name == "-" {
            return without_args(Manifests::Stdin, args);
        }
        if path.is_dir() {
            if !has_manifests(path, 0).map_err(|error| unreadable(path, error))? {
                return Err(Failure::new(
                    FailureCode::NoWorkload,
                    format!("there are no manifests in {}", path.display()),
                )
                .with_hint("manifests end in .yaml, .yml or .json"));
            }
            return without_args(Manifests::Directory(path.to_owned()), args);
        }
        if is_manifest(path) {
            let file = File::open(path).map_err(|error| unreadable(path, error))?;
            let manifests = without_args(Manifests::File(path.to_owned()), args)?;
            let is_empty = |meta: std::fs::Metadata| meta.is_file() && meta.len() == 0;
            if file.metadata().is_ok_and(is_empty) {
                return Err(Failure::new(
                    FailureCode::NoWorkload,
                    format!("{} is empty", path.display()),
                )
                .with_hint("a manifest has at least a kind, an apiVersion and a name"));
            }
            return Ok(manifests);
        }
        if !name.to_string_lossy().contains('/') && !path.exists() {
            return Self::on_path(name, args);
        }
        let meta = path.metadata().map_err(|error| unreadable(path, error))?;
        if meta.permissions().mode() & 0o111 != 0 {
            let program = std::path::absolute(path).map_err(|error| unreadable(path, error))?;
            return Ok(Self::Program {
                program,
                args: args.to_vec(),
            });
        }
        Self::script(path, args)
    }

    /// The file or directory of a workload that was named by a path. Programs found in PATH are not carried: each node has its own.
    pub fn file(&self, name: &OsStr) -> Option<PathBuf> {
        let is_on_path =
            matches!(self, Self::Program { program, .. } if program == Path::new(name));
        let is_file = !is_on_path || Path::new(name).is_absolute();
        if *self == Self::Manifests(Manifests::Stdin) || !is_file {
            return None;
        }
        std::path::absolute(name).ok()
    }

    /// The same workload after its directory was moved.
    pub fn moved(self, from: &Path, to: &Path) -> Self {
        let moved = |path: PathBuf| match path.strip_prefix(from) {
            Ok(rest) => to.join(rest),
            Err(_) => path,
        };
        match self {
            Self::Program { program, args } => Self::Program {
                program: moved(program),
                args: args
                    .into_iter()
                    .map(|arg| moved(arg.into()).into_os_string())
                    .collect(),
            },
            Self::Manifests(Manifests::File(path)) => Self::Manifests(Manifests::File(moved(path))),
            Self::Manifests(Manifests::Directory(path)) => {
                Self::Manifests(Manifests::Directory(moved(path)))
            }
            Self::Manifests(Manifests::Stdin) => self,
        }
    }

    fn on_path(name: &OsStr, args: &[OsString]) -> Result<Self, Failure> {
        // The cluster puts kubectl on the workload's PATH.
        let text = name.to_string_lossy();
        let on_path = slurm::on_path(&text, &std::env::var_os("PATH").unwrap_or_default());
        if on_path.is_none() && name != "kubectl" {
            return Err(Failure::new(
                FailureCode::NoWorkload,
                format!("there is neither a file nor a program called {text}"),
            )
            .with_hint(
                "give the path of a script, of manifests (.yaml) or of a directory of manifests",
            ));
        }
        Ok(Self::Program {
            program: name.into(),
            args: args.to_vec(),
        })
    }

    /// Runs a script without execute permission with the interpreter that its `#!` line names.
    fn script(path: &Path, args: &[OsString]) -> Result<Self, Failure> {
        let mut head = [0; 256];
        let count = File::open(path)
            .and_then(|mut file| file.read(&mut head))
            .map_err(|error| unreadable(path, error))?;
        let interpreter = interpreter(&head[..count]).ok_or_else(|| {
            Failure::new(
                FailureCode::NoWorkload,
                format!("{} is neither a manifest nor a program", path.display()),
            )
            .with_hint(format!(
                "manifests end in .yaml, .yml or .json; for a program: chmod +x {}",
                path.display()
            ))
        })?;
        let path = std::path::absolute(path).map_err(|error| unreadable(path, error))?;
        let mut interpreter = interpreter.into_iter();
        let program = interpreter.next().unwrap_or_default().into();
        let args = interpreter
            .chain([path.into()])
            .chain(args.iter().cloned())
            .collect();
        Ok(Self::Program { program, args })
    }
}

/// Environment variables of a workload, in addition to the inherited ones.
pub fn environment(
    name: &str,
    kubeconfig: &Path,
    programs: &Path,
    cache: &Path,
    api: &str,
    token: &str,
    port: u16,
) -> BTreeMap<&'static str, OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::iter::once(programs.to_owned()).chain(std::env::split_paths(&path));
    let path = std::env::join_paths(dirs).unwrap_or(path);
    BTreeMap::from([
        ("KUBECONFIG", kubeconfig.into()),
        // By default kubectl's caches would be in the home directory.
        ("KUBECACHEDIR", cache.into()),
        ("PATH", path),
        (NAME_VARIABLE, name.into()),
        ("K8S_CLUSTER_API", api.into()),
        ("K8S_CLUSTER_API_TOKEN", token.into()),
        ("K8S_PORT", port.to_string().into()),
    ])
}

fn without_args(manifests: Manifests, args: &[OsString]) -> Result<Workload, Failure> {
    match args.first() {
        None => Ok(Workload::Manifests(manifests)),
        Some(arg) => Err(Failure::new(
            FailureCode::Usage,
            format!("manifests take no arguments, but {} follows", arg.display()),
        )
        .with_hint(match arg.to_string_lossy().starts_with('-') {
            true => "options come before the workload: coracle run -N2 app.yaml",
            false => "put several manifests into a directory, or pipe them: cat a.yaml b.yaml | coracle run -",
        })),
    }
}

/// Whether a directory contains a manifest, at any depth. Links are not followed: they may form a cycle.
fn has_manifests(dir: &Path, depth: u32) -> io::Result<bool> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let is_dir = entry.file_type()?.is_dir();
        if is_dir && depth < MAX_DEPTH && has_manifests(&entry.path(), depth + 1)?
            || !is_dir && is_manifest(&entry.path())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a file has the extension of a manifest.
pub fn is_manifest(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| ["yaml", "yml", "json"].contains(&extension))
}

/// The error of a workload that cannot be read.
pub fn unreadable(path: &Path, error: io::Error) -> Failure {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "check the path; relative ones start at the current directory",
        io::ErrorKind::PermissionDenied => "check its permissions",
        _ => "check that it is a readable file",
    };
    Failure::new(
        FailureCode::NoWorkload,
        format!("cannot read {}", path.display()),
    )
    .with_source(error)
    .with_hint(hint)
}

/// The interpreter and the argument in a `#!` line.
fn interpreter(head: &[u8]) -> Option<Vec<OsString>> {
    let line = head
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let line = std::str::from_utf8(line).ok()?.trim();
    // As the kernel: one argument, which may contain spaces.
    let mut parts = line.splitn(2, char::is_whitespace);
    let program = parts.next().filter(|program| !program.is_empty())?;
    let rest = parts.next().map(str::trim).filter(|rest| !rest.is_empty());
    Some(
        std::iter::once(program)
            .chain(rest)
            .map(OsString::from)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(path: &Path) -> Result<Workload, Failure> {
        Workload::find(path.as_os_str(), &["arg".into()])
    }

    #[test]
    fn scripts_run_with_and_without_execute_permission() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("a script");
        std::fs::write(&script, "#!/usr/bin/env -S bash -e\necho\n").unwrap();
        let Workload::Program { program, args } = find(&script).unwrap() else {
            panic!()
        };
        assert_eq!(program, Path::new("/usr/bin/env"));
        assert_eq!(
            args,
            [
                "-S bash -e".into(),
                script.clone().into_os_string(),
                "arg".into()
            ]
        );
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o700)).unwrap();
        let Workload::Program { program, .. } = find(&script).unwrap() else {
            panic!()
        };
        assert_eq!(program, script);
    }

    #[test]
    fn workload_is_carried_only_if_named_by_path() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        for mode in [0o600, 0o700] {
            std::fs::set_permissions(&script, PermissionsExt::from_mode(mode)).unwrap();
            let workload = find(&script).unwrap();
            assert_eq!(workload.file(script.as_os_str()), Some(script.clone()));
            let moved = workload.moved(dir.path(), Path::new("/new"));
            assert!(format!("{moved:?}").contains("/new/script"), "{moved:?}");
        }
        let named = Workload::find(OsStr::new("sh"), &[]).unwrap();
        assert_eq!(named.file(OsStr::new("sh")), None);
        let stdin = Workload::find(OsStr::new("-"), &[]).unwrap();
        assert_eq!(stdin.file(OsStr::new("-")), None);
    }

    #[test]
    fn error_names_problem_of_workload() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("notes.txt");
        std::fs::write(&text, "hello").unwrap();
        for (path, expected) in [
            (text.as_path(), "neither a manifest nor a program"),
            (Path::new("/no/such.yaml"), "cannot read"),
            (Path::new("/no/such/program"), "cannot read"),
            (
                Path::new("no-such-program-anywhere"),
                "neither a file nor a program",
            ),
            (dir.path(), "there are no manifests"),
        ] {
            let error = find(path).unwrap_err().to_string();
            assert!(
                error.contains(expected),
                "{error:?} should contain {expected:?}"
            );
        }
    }
}
