//! Files that keep the logs of containers: `DIR/pods/NAMESPACE/POD/CONTAINER.log`.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::ContainerKey;

/// Appends to the log of a container. Opens the file for each call, so that the number of containers does not matter.
pub fn append(dir: &Path, container: &ContainerKey, bytes: &[u8]) -> io::Result<()> {
    let path = path_of(dir, container).ok_or(io::ErrorKind::InvalidFilename)?;
    let mut file = match open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = path.parent() {
                DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(parent)?;
            }
            open(&path)?
        }
        opened => opened?,
    };
    file.write_all(bytes)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
}

/// The file of a container; `None` if a name could lead out of `dir`. The API server accepts no such names.
fn path_of(dir: &Path, container: &ContainerKey) -> Option<PathBuf> {
    let names = [&container.namespace, &container.pod, &container.container];
    let are_safe = names.into_iter().all(|name| is_safe_name(name));
    are_safe.then(|| {
        dir.join("pods")
            .join(&container.namespace)
            .join(&container.pod)
            .join(format!("{}.log", container.container))
    })
}

/// Whether a name is a DNS subdomain, as the API server requires, and short enough for a file system.
fn is_safe_name(name: &str) -> bool {
    let is_safe_char =
        |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    (1..=253).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_safe_char)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, pod: &str, container: &str) -> ContainerKey {
        ContainerKey {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            uid: "u".to_owned(),
            container: container.to_owned(),
        }
    }

    #[test]
    fn names_do_not_lead_out_of_the_directory() {
        for bad in ["", ".", "..", "../x", "a/b", "/etc", "a\0b", ".hidden", "A"] {
            for key in [key(bad, "p", "c"), key("n", bad, "c"), key("n", "p", bad)] {
                assert_eq!(path_of(Path::new("/logs"), &key), None, "{key:?}");
            }
        }
    }

    #[test]
    fn log_is_appended_for_the_user_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let key = key("default", "web-0.a", "main");
        append(dir.path(), &key, b"one\n").unwrap();
        append(dir.path(), &key, b"two\n").unwrap();
        let path = dir.path().join("pods/default/web-0.a/main.log");
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\n");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        std::fs::write(&other, "").unwrap();
        let parent = dir.path().join("pods/n/p");
        std::fs::create_dir_all(&parent).unwrap();
        std::os::unix::fs::symlink(&other, parent.join("c.log")).unwrap();
        assert!(append(dir.path(), &key("n", "p", "c"), b"x").is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"");
    }
}
