//! Environment variables from files that other containers of the pod have written (`valueFrom.fileKeyRef`).
//!
//! Such a file is untrusted: its path is resolved with the volume as root, and only a regular file of limited size is read.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use k8s_openapi::api::core::v1::{EnvVar, FileKeySelector};
use pod_protocol::Problem;
use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::node_services::ReadyVolume;

const MAX_ENV_FILE_SIZE: u64 = 1 << 20;

/// Replaces references to files with their values. `$` is escaped, so that values are not expanded.
pub(super) fn resolve(
    variables: &[EnvVar],
    volumes: &BTreeMap<String, ReadyVolume>,
) -> Result<Vec<EnvVar>, Problem> {
    let mut all = Vec::with_capacity(variables.len());
    for variable in variables {
        let from = variable.value_from.as_ref();
        let Some(selector) = from.and_then(|from| from.file_key_ref.as_ref()) else {
            all.push(variable.clone());
            continue;
        };
        let value = value(selector, volumes)
            .map_err(|message| Problem::new("CreateContainerConfigError", message))?;
        all.extend(value.map(|value| EnvVar {
            name: variable.name.clone(),
            value: Some(value.replace('$', "$$")),
            value_from: None,
        }));
    }
    Ok(all)
}

/// Returns `None` if the value is missing and optional.
fn value(
    selector: &FileKeySelector,
    volumes: &BTreeMap<String, ReadyVolume>,
) -> Result<Option<String>, String> {
    let FileKeySelector {
        key,
        path,
        volume_name,
        optional,
    } = selector;
    let Some(ReadyVolume::Directory { path: dir, .. }) = volumes.get(volume_name) else {
        return Err(format!(
            "cannot find the volume {volume_name:?} referenced by FileKeyRef"
        ));
    };
    let optional = *optional == Some(true);
    let text = match read(dir, path) {
        Ok(text) => text,
        Err(error) if optional && error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(format!(
                "couldn't parse env file: {path:?} of volume {volume_name:?}: {error}"
            ));
        }
    };
    let value = parse(&text, key).map_err(|(line, why)| {
        format!("couldn't parse env file: {path:?} of volume {volume_name:?}, line {line}: {why}")
    })?;
    match value.filter(|value| !value.is_empty()) {
        Some(value) if value.contains('\0') => Err(format!(
            "the value of {key:?} in file {path:?} of volume {volume_name:?} contains a NUL byte"
        )),
        None if !optional => Err(format!(
            "environment variable key {key:?} not found in file {path:?} of volume {volume_name:?}"
        )),
        value => Ok(value),
    }
}

fn read(dir: &Path, path: &str) -> std::io::Result<String> {
    let root = rustix::fs::open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // Opening a pipe must not block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve_flags = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve_flags)?;
    let file = std::fs::File::from(file);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_ENV_FILE_SIZE {
        return Err(std::io::Error::other("not a regular file of at most 1 MiB"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_ENV_FILE_SIZE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses lines of the form `NAME='value'`, where the value may span lines, and returns the first value of `key`.
fn parse(text: &str, key: &str) -> Result<Option<String>, (usize, &'static str)> {
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let syntax_error = |why| Err((number, why));
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, rest)) = line.split_once('=') else {
            return syntax_error("missing '='");
        };
        if name.is_empty() {
            return syntax_error("missing name before '='");
        }
        if name.ends_with([' ', '\t']) {
            return syntax_error("space before '='");
        }
        // As in a shell, the value is empty then.
        if rest.starts_with([' ', '\t']) {
            if name == key {
                return Ok(None);
            }
            continue;
        }
        let Some(mut rest) = rest.strip_prefix('\'') else {
            return syntax_error("value is not in single quotes");
        };
        let mut value = String::new();
        let after = loop {
            if let Some((last, after)) = rest.split_once('\'') {
                value.push_str(last);
                break after.trim_start_matches([' ', '\t']);
            }
            value.push_str(rest);
            value.push('\n');
            match lines.next() {
                Some((_, next)) => rest = next,
                None => return syntax_error("unterminated quote"),
            }
        };
        if !after.is_empty() && !after.starts_with('#') {
            return syntax_error("unexpected text after the closing quote");
        }
        if name == key {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use k8s_openapi::api::core::v1::EnvVarSource;

    use super::*;

    #[test]
    fn file_is_parsed_as_upstream_does() {
        let text = "# comment\n\n  A='1 $(B)'\nB='two\nlines' # why\nA='again'\nC= 'x'\nD=''\n";
        let get = |key: &str| parse(text, key).unwrap();
        assert_eq!(get("A").as_deref(), Some("1 $(B)"));
        assert_eq!(get("B").as_deref(), Some("two\nlines"));
        assert_eq!(get("C"), None);
        assert_eq!(get("D").as_deref(), Some(""));
        assert_eq!(get("E"), None);
        for wrong in [
            "A", "=x", "A ='x'", "A=x", "A=", "A='x", "A='x'y", "A=\"x\"",
        ] {
            assert!(parse(wrong, "Z").is_err(), "{wrong}");
        }
        // Parsing stops at the key.
        assert_eq!(parse("A='1'\nnonsense", "A").unwrap().as_deref(), Some("1"));
    }

    fn variable(path: &str, key: &str, optional: bool) -> EnvVar {
        EnvVar {
            name: "V".to_owned(),
            value: None,
            value_from: Some(EnvVarSource {
                file_key_ref: Some(FileKeySelector {
                    key: key.to_owned(),
                    path: path.to_owned(),
                    volume_name: "config".to_owned(),
                    optional: Some(optional),
                }),
                ..Default::default()
            }),
        }
    }

    #[test]
    fn value_is_read_only_from_inside_the_volume() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "K='stolen'\n").unwrap();
        let volume = outside.path().join("volume");
        std::fs::create_dir(&volume).unwrap();
        std::fs::write(volume.join("env"), "K='a$b'\n").unwrap();
        symlink("../secret", volume.join("out")).unwrap();
        symlink("/env", volume.join("in")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, volume.join("pipe"), Mode::RWXU).unwrap();
        let volumes = BTreeMap::from([(
            "config".to_owned(),
            ReadyVolume::Directory {
                path: volume,
                read_only: false,
            },
        )]);
        let get = |path: &str, key: &str, optional: bool| {
            let resolved = resolve(&[variable(path, key, optional)], &volumes);
            resolved.map(|all| all.into_iter().next().and_then(|one| one.value))
        };
        assert_eq!(get("env", "K", false).unwrap().as_deref(), Some("a$$b"));
        assert_eq!(get("in", "K", false).unwrap().as_deref(), Some("a$$b"));
        assert_eq!(get("env", "L", true).unwrap(), None);
        assert_eq!(get("none", "K", true).unwrap(), None);
        for path in ["out", "pipe", "none", "."] {
            let rejected = get(path, "K", false).unwrap_err();
            assert_eq!(rejected.reason, "CreateContainerConfigError");
            assert!(rejected.message.contains("couldn't parse env file"));
        }
        let missing = get("env", "L", false).unwrap_err().message;
        assert!(
            missing.contains("environment variable key \"L\" not found"),
            "{missing}"
        );
    }
}
