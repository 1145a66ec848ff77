//! Paths of hostPath volumes that lead to other directories of the node.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A directory that pods find under another path, as if it were mounted there on each node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePath {
    /// The path in hostPath volumes.
    pub path: PathBuf,
    /// The directory on the node.
    pub dir: PathBuf,
    /// A node that has `path` uses its own.
    pub only_if_missing: bool,
}

/// Another path to mount for a hostPath volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedPath {
    /// The path to mount …
    pub path: PathBuf,
    /// … unless this one exists on the node.
    pub unless_exists: Option<PathBuf>,
}

impl NodePath {
    /// The path to mount for a hostPath volume with this path, if it is below this node path.
    fn map(&self, path: &Path) -> Option<MappedPath> {
        let rest = path.strip_prefix(&self.path).ok()?;
        // Without a trailing slash.
        let path = match rest.as_os_str().is_empty() {
            true => self.dir.clone(),
            false => self.dir.join(rest),
        };
        Some(MappedPath {
            path,
            unless_exists: self.only_if_missing.then(|| self.path.clone()),
        })
    }

    /// The mapping of the longest path that contains `path`.
    pub fn find(all: &[Self], path: &Path) -> Option<MappedPath> {
        let mut matching: Vec<_> = (all.iter())
            .filter_map(|node_path| Some((node_path, node_path.map(path)?)))
            .collect();
        matching.sort_by_key(|(node_path, _)| node_path.path.components().count());
        matching.pop().map(|(_, mapped)| mapped)
    }
}

impl MappedPath {
    /// The path to mount.
    pub(crate) fn choose<'a>(mapped: Option<&'a Self>, own: &'a Path) -> &'a Path {
        match mapped {
            Some(mapped)
                if mapped
                    .unless_exists
                    .as_ref()
                    .is_none_or(|path| !path.exists()) =>
            {
                &mapped.path
            }
            _ => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_node_path_applies() {
        let node_path = |path: &str, dir: &str, only_if_missing| NodePath {
            path: path.into(),
            dir: dir.into(),
            only_if_missing,
        };
        let all = [
            node_path("/app", "/home/user", true),
            node_path("/app/data", "/scratch", false),
        ];
        let find = |path: &str| NodePath::find(&all, Path::new(path));
        let mapped = |path: &str, unless_exists: Option<&str>| MappedPath {
            path: path.into(),
            unless_exists: unless_exists.map(PathBuf::from),
        };
        assert_eq!(find("/app"), Some(mapped("/home/user", Some("/app"))));
        assert_eq!(
            find("/app/x/y"),
            Some(mapped("/home/user/x/y", Some("/app")))
        );
        assert_eq!(find("/app/data/x"), Some(mapped("/scratch/x", None)));
        assert_eq!(find("/apps"), None);
        assert_eq!(find("/"), None);
    }

    #[test]
    fn own_path_of_node_has_priority() {
        let dir = tempfile::tempdir().unwrap();
        let mapped = |unless_exists: Option<&Path>| MappedPath {
            path: "/other".into(),
            unless_exists: unless_exists.map(Path::to_owned),
        };
        let choose =
            |mapped: Option<MappedPath>| MappedPath::choose(mapped.as_ref(), dir.path()).to_owned();
        assert_eq!(choose(None), dir.path());
        assert_eq!(choose(Some(mapped(Some(dir.path())))), dir.path());
        assert_eq!(choose(Some(mapped(None))), Path::new("/other"));
        let missing = dir.path().join("missing");
        assert_eq!(choose(Some(mapped(Some(&missing)))), Path::new("/other"));
    }
}
