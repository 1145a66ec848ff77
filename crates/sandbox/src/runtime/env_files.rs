//! Variables whose values other containers of the pod have written to a file (`valueFrom.fileKeyRef`).
//!
//! The file is a container's, so it is nobody to be trusted: it is looked for as if its volume were all there is, and
//! only a plain file of a moderate size is read.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use k8s_openapi::api::core::v1::{EnvVar, FileKeySelector};
use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::seams::Volume;
use pod_protocol::Problem;

/// No honest file is longer.
const MAX_FILE: u64 = 1 << 20;

/// The variables with values in place of references to files. Values stay as they are: their dollars are doubled.
pub(super) fn put_in(
    variables: &[EnvVar],
    volumes: &BTreeMap<String, Volume>,
) -> Result<Vec<EnvVar>, Problem> {
    let mut all = Vec::with_capacity(variables.len());
    for variable in variables {
        let from = variable.value_from.as_ref();
        let Some(selector) = from.and_then(|from| from.file_key_ref.as_ref()) else {
            all.push(variable.clone());
            continue;
        };
        let value = value(selector, volumes).map_err(|message| Problem {
            reason: "CreateContainerConfigError".to_owned(),
            message,
        })?;
        all.extend(value.map(|value| EnvVar {
            name: variable.name.clone(),
            value: Some(value.replace('$', "$$")),
            value_from: None,
        }));
    }
    Ok(all)
}

/// `None`: it isn't there, and need not be.
fn value(
    selector: &FileKeySelector,
    volumes: &BTreeMap<String, Volume>,
) -> Result<Option<String>, String> {
    let FileKeySelector {
        key,
        path,
        volume_name,
        optional,
    } = selector;
    let Some(Volume::Directory { path: dir, .. }) = volumes.get(volume_name) else {
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
    let found = parse(&text, key).map_err(|(line, why)| {
        format!("couldn't parse env file: {path:?} of volume {volume_name:?}, line {line}: {why}")
    })?;
    match found.filter(|value| !value.is_empty()) {
        Some(value) if value.contains('\0') => Err(format!(
            "the value of {key:?} in file {path:?} of volume {volume_name:?} contains a NUL byte"
        )),
        None if !optional => Err(format!(
            "environment variable key {key:?} not found in file {path:?} of volume {volume_name:?}"
        )),
        found => Ok(found),
    }
}

fn read(dir: &Path, path: &str) -> std::io::Result<String> {
    let root = rustix::fs::open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // A pipe must not make us wait.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)?;
    let file = std::fs::File::from(file);
    let found = file.metadata()?;
    if !found.is_file() || found.len() > MAX_FILE {
        return Err(std::io::Error::other("it is not a file of moderate size"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of `key`: lines of `NAME='value'`, in single quotes, over as many lines as it takes. The first counts.
fn parse(text: &str, key: &str) -> Result<Option<String>, (usize, &'static str)> {
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let wrong = |why| Err((number, why));
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, rest)) = line.split_once('=') else {
            return wrong("there is no '='");
        };
        if name.is_empty() {
            return wrong("there is no name before '='");
        }
        if name.ends_with([' ', '\t']) {
            return wrong("there is a space before '='");
        }
        // As a shell would have it: the value is empty, and what follows is something else.
        if rest.starts_with([' ', '\t']) {
            if name == key {
                return Ok(None);
            }
            continue;
        }
        let Some(mut rest) = rest.strip_prefix('\'') else {
            return wrong("a value must be in single quotes");
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
                None => return wrong("the quote is not closed"),
            }
        };
        if !after.is_empty() && !after.starts_with('#') {
            return wrong("something follows the closing quote");
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
    fn files_are_read_as_upstream_does() {
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
        // What comes after is nobody's business.
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
    fn values_come_from_the_volume_and_from_nowhere_else() {
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
            Volume::Directory {
                path: volume,
                read_only: false,
            },
        )]);
        let get = |path: &str, key: &str, optional: bool| {
            let put = put_in(&[variable(path, key, optional)], &volumes);
            put.map(|all| all.into_iter().next().and_then(|one| one.value))
        };
        assert_eq!(get("env", "K", false).unwrap().as_deref(), Some("a$$b"));
        assert_eq!(get("in", "K", false).unwrap().as_deref(), Some("a$$b"));
        assert_eq!(get("env", "L", true).unwrap(), None);
        assert_eq!(get("none", "K", true).unwrap(), None);
        for path in ["out", "pipe", "none", "."] {
            let refused = get(path, "K", false).unwrap_err();
            assert_eq!(refused.reason, "CreateContainerConfigError");
            assert!(refused.message.contains("couldn't parse env file"));
        }
        let missing = get("env", "L", false).unwrap_err().message;
        assert!(
            missing.contains("environment variable key \"L\" not found"),
            "{missing}"
        );
    }
}
