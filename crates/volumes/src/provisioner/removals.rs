//! Directories that are being removed: a large one takes minutes, and nobody else is to wait for it.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use tokio::task::JoinSet;

use super::Remove;

/// What is under way, and what has ended since it was last asked for.
#[derive(Default)]
pub(super) struct Removals {
    under_way: JoinSet<(PathBuf, io::Result<()>)>,
    /// `None` while it is under way.
    ends: HashMap<PathBuf, Option<io::Result<()>>>,
}

impl Removals {
    /// How the removal of a directory ended. If it hasn't, it is under way: it is begun if it wasn't.
    pub(super) fn of(&mut self, dir: &Path, remove: &Remove) -> Option<io::Result<()>> {
        match self.ends.remove(dir) {
            Some(Some(end)) => return Some(end),
            Some(None) => {}
            None if !dir.exists() => return Some(Ok(())),
            None => {
                let (removing, dir) = (remove(dir.to_owned()), dir.to_owned());
                let removing = async move { (dir, removing.await) };
                self.under_way.spawn(removing);
            }
        }
        self.ends.insert(dir.to_owned(), None);
        None
    }

    /// Waits for the next end; for ever, if nothing is under way. May be dropped at any time.
    pub(super) async fn next(&mut self) {
        match self.under_way.join_next().await {
            Some(Ok((dir, end))) => _ = self.ends.insert(dir, Some(end)),
            Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures::FutureExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_large_directory_keeps_nobody_waiting() {
        let home = tempfile::tempdir().unwrap();
        let dir = |name: &str| home.path().join(name);
        for name in ["large", "small"] {
            std::fs::create_dir(dir(name)).unwrap();
        }
        let remove: Remove = Arc::new(|dir| {
            async move {
                let large = dir.ends_with("large");
                tokio::time::sleep(Duration::from_secs(if large { 600 } else { 1 })).await;
                std::fs::remove_dir(dir)
            }
            .boxed()
        });
        let mut removals = Removals::default();
        assert!(removals.of(&dir("gone"), &remove).is_some());
        for _ in 0..2 {
            assert!(removals.of(&dir("large"), &remove).is_none());
            assert!(removals.of(&dir("small"), &remove).is_none());
        }
        removals.next().await;
        assert!(removals.of(&dir("small"), &remove).unwrap().is_ok());
        assert!(removals.of(&dir("large"), &remove).is_none());
        removals.next().await;
        assert!(removals.of(&dir("large"), &remove).unwrap().is_ok());
        assert!(removals.next().now_or_never().is_none());
    }
}
