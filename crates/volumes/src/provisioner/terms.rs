//! Which `shared` volumes end with which cluster, noted beside them: for a cluster that is killed before it can take its
//! volumes away. A later one asks whether the former is over, and does it then.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use super::Remove;

/// What the name of a note has more than that of the directory.
const SUFFIX: &str = "ends-with";

/// The notes of one cluster.
pub(super) struct Terms {
    /// Who it is, in one line.
    cluster: String,
    noted: BTreeSet<PathBuf>,
}

impl Terms {
    /// With what it has noted in `shared_dir` before.
    pub(super) fn new(shared_dir: &Path, cluster: &str) -> Self {
        let ours = noted(shared_dir).into_iter();
        let ours = ours.filter(|(_, noted)| noted == cluster);
        Self {
            cluster: cluster.to_owned(),
            noted: ours.map(|(dir, _)| dir).collect(),
        }
    }

    pub(super) fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Notes that a directory ends with this cluster, or that it does no longer.
    pub(super) fn set(&mut self, dir: &Path, ends: bool) -> io::Result<()> {
        if ends == self.noted.contains(dir) {
            return Ok(());
        }
        if ends {
            // Under its name only when it is whole: half a line would name nobody.
            let new = dir.with_extension(format!("{SUFFIX}.new"));
            std::fs::write(&new, format!("{}\n", self.cluster))?;
            std::fs::rename(&new, note(dir))?;
            self.noted.insert(dir.to_owned());
        } else {
            remove_note(dir)?;
            self.noted.remove(dir);
        }
        Ok(())
    }
}

/// The directories in `shared_dir` that end with a cluster, and with which.
fn noted(shared_dir: &Path) -> Vec<(PathBuf, String)> {
    let entries = std::fs::read_dir(shared_dir).into_iter().flatten();
    let notes = entries.flatten().filter_map(|entry| {
        let path = entry.path();
        let is_note = path.extension().is_some_and(|suffix| suffix == SUFFIX);
        let cluster = is_note.then(|| std::fs::read_to_string(&path).ok())??;
        Some((path.with_extension(""), cluster.trim_end().to_owned()))
    });
    notes.collect()
}

/// The clusters with which something in `shared_dir` ends.
pub fn clusters(shared_dir: &Path) -> BTreeSet<String> {
    let noted = noted(shared_dir).into_iter();
    noted.map(|(_, cluster)| cluster).collect()
}

/// Removes what was to end with clusters that are over.
pub async fn sweep(shared_dir: &Path, remove: &Remove, over: &BTreeSet<String>) {
    for (dir, cluster) in noted(shared_dir) {
        if !over.contains(&cluster) {
            continue;
        }
        let removed = match dir.exists() {
            true => remove(dir.clone()).await,
            false => Ok(()),
        };
        match removed.and_then(|()| remove_note(&dir)) {
            Ok(()) => {
                tracing::info!(dir = %dir.display(), cluster, "removed a volume that was left")
            }
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "can't remove a volume that was left");
            }
        }
    }
}

fn note(dir: &Path) -> PathBuf {
    dir.with_extension(SUFFIX)
}

fn remove_note(dir: &Path) -> io::Result<()> {
    match std::fs::remove_file(note(dir)) {
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
    async fn what_a_dead_cluster_left_is_swept_and_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let dir = |name: &str| home.path().join(name);
        for name in ["dead", "alive", "kept", "retained"] {
            std::fs::create_dir(dir(name)).unwrap();
        }
        let of = |cluster| Terms::new(home.path(), cluster);
        let (mut dead, mut alive) = (of("lab 1"), of("lab 2"));
        for name in ["dead", "kept", "gone"] {
            dead.set(&dir(name), true).unwrap();
        }
        // By another process of the same cluster.
        of("lab 1").set(&dir("kept"), false).unwrap();
        alive.set(&dir("alive"), true).unwrap();
        let clusters = clusters(home.path());
        assert_eq!(clusters, ["lab 1", "lab 2"].map(str::to_owned).into());

        let remove: Remove = Arc::new(|dir| async move { std::fs::remove_dir_all(dir) }.boxed());
        sweep(home.path(), &remove, &["lab 1".to_owned()].into()).await;
        let left = ["alive", "alive.ends-with", "kept", "retained"];
        assert_eq!(names(home.path()), left);
    }
}
