//! Marker files of `shared` volumes that are removed with their cluster. If a cluster is killed before it removes them, a later
//! cluster does it.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::RemoveDir;

/// The extension of marker files; the name is that of the directory.
const MARKER_EXTENSION: &str = "ends-with";

/// The markers of one cluster.
pub(super) struct DeletionMarkers {
    /// The line that identifies the cluster.
    cluster: String,
    marked: BTreeSet<PathBuf>,
}

impl DeletionMarkers {
    /// Reads the existing markers in `shared_dir`.
    pub(super) fn new(shared_dir: &Path, cluster: &str) -> Self {
        let marked = marked_dirs(shared_dir).into_iter();
        let marked = marked.filter(|(_, owner)| owner == cluster);
        Self {
            cluster: cluster.to_owned(),
            marked: marked.map(|(dir, _)| dir).collect(),
        }
    }

    pub(super) fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Creates or removes the marker of a directory.
    pub(super) fn set(&mut self, dir: &Path, with_cluster: bool) -> io::Result<()> {
        if with_cluster == self.marked.contains(dir) {
            return Ok(());
        }
        if with_cluster {
            // Atomically: a partial line would not identify the cluster.
            let new = dir.with_extension(format!("{MARKER_EXTENSION}.new"));
            std::fs::write(&new, format!("{}\n", self.cluster))?;
            std::fs::rename(&new, marker_path(dir))?;
            self.marked.insert(dir.to_owned());
        } else {
            remove_marker(dir)?;
            self.marked.remove(dir);
        }
        Ok(())
    }
}

/// The marked directories in `shared_dir`, with their clusters.
fn marked_dirs(shared_dir: &Path) -> Vec<(PathBuf, String)> {
    let entries = std::fs::read_dir(shared_dir).into_iter().flatten();
    let markers = entries.flatten().filter_map(|entry| {
        let path = entry.path();
        let is_marker = path
            .extension()
            .is_some_and(|suffix| suffix == MARKER_EXTENSION);
        let cluster = is_marker.then(|| std::fs::read_to_string(&path).ok())??;
        Some((path.with_extension(""), cluster.trim_end().to_owned()))
    });
    markers.collect()
}

/// The clusters with marked directories in `shared_dir`.
pub fn marked_clusters(shared_dir: &Path) -> BTreeSet<String> {
    let marked = marked_dirs(shared_dir).into_iter();
    marked.map(|(_, cluster)| cluster).collect()
}

/// Removes the marked directories of clusters that have ended.
pub async fn remove_marked_volumes(
    shared_dir: &Path,
    remove: &RemoveDir,
    ended: &BTreeSet<String>,
) {
    for (dir, cluster) in marked_dirs(shared_dir) {
        if !ended.contains(&cluster) {
            continue;
        }
        let removed = match dir.exists() {
            true => remove(dir.clone()).await,
            false => Ok(()),
        };
        match removed.and_then(|()| remove_marker(&dir)) {
            Ok(()) => {
                tracing::info!(dir = %dir.display(), cluster, "removed leftover volume of an ended cluster")
            }
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "failed to remove leftover volume of an ended cluster");
            }
        }
    }
}

fn marker_path(dir: &Path) -> PathBuf {
    dir.with_extension(MARKER_EXTENSION)
}

fn remove_marker(dir: &Path) -> io::Result<()> {
    match std::fs::remove_file(marker_path(dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn only_marked_volumes_of_ended_clusters_are_removed() {
        let home = tempfile::tempdir().unwrap();
        let dir = |name: &str| home.path().join(name);
        for name in ["dead", "alive", "kept", "retained"] {
            std::fs::create_dir(dir(name)).unwrap();
        }
        let of = |cluster| DeletionMarkers::new(home.path(), cluster);
        let (mut dead, mut alive) = (of("lab 1"), of("lab 2"));
        for name in ["dead", "kept", "gone"] {
            dead.set(&dir(name), true).unwrap();
        }
        // From another process of the same cluster.
        of("lab 1").set(&dir("kept"), false).unwrap();
        alive.set(&dir("alive"), true).unwrap();
        let clusters = marked_clusters(home.path());
        assert_eq!(clusters, ["lab 1", "lab 2"].map(str::to_owned).into());

        let remove: RemoveDir = Arc::new(|dir| async move { std::fs::remove_dir_all(dir) }.boxed());
        remove_marked_volumes(home.path(), &remove, &["lab 1".to_owned()].into()).await;
        let left = ["alive", "alive.ends-with", "kept", "retained"];
        assert_eq!(names(home.path()), left);
    }
}
