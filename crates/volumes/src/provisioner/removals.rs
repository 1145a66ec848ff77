//! Removes directories in the background: a large one takes minutes and must not delay other volumes.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use tokio::task::JoinSet;

use super::RemoveDir;

/// Running removals, and results that were not fetched yet.
#[derive(Default)]
pub(super) struct Removals {
    running: JoinSet<(PathBuf, io::Result<()>)>,
    /// `None` while the removal runs.
    results: HashMap<PathBuf, Option<io::Result<()>>>,
}

impl Removals {
    /// The result of a directory's removal; `None` while it runs. Starts the removal if it does not run yet.
    pub(super) fn result_of(&mut self, dir: &Path, remove: &RemoveDir) -> Option<io::Result<()>> {
        match self.results.remove(dir) {
            Some(Some(result)) => return Some(result),
            Some(None) => {}
            None if !dir.exists() => return Some(Ok(())),
            None => {
                let (removal, dir) = (remove(dir.to_owned()), dir.to_owned());
                self.running.spawn(async move { (dir, removal.await) });
            }
        }
        self.results.insert(dir.to_owned(), None);
        None
    }

    /// Waits until a removal ends, forever if none runs. Cancel-safe.
    pub(super) async fn next_finished(&mut self) {
        match self.running.join_next().await {
            Some(Ok((dir, result))) => _ = self.results.insert(dir, Some(result)),
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
    async fn large_removal_does_not_delay_others() {
        let home = tempfile::tempdir().unwrap();
        let dir = |name: &str| home.path().join(name);
        for name in ["large", "small"] {
            std::fs::create_dir(dir(name)).unwrap();
        }
        let remove: RemoveDir = Arc::new(|dir| {
            async move {
                let large = dir.ends_with("large");
                tokio::time::sleep(Duration::from_secs(if large { 600 } else { 1 })).await;
                std::fs::remove_dir(dir)
            }
            .boxed()
        });
        let mut removals = Removals::default();
        assert!(removals.result_of(&dir("gone"), &remove).is_some());
        for _ in 0..2 {
            assert!(removals.result_of(&dir("large"), &remove).is_none());
            assert!(removals.result_of(&dir("small"), &remove).is_none());
        }
        removals.next_finished().await;
        assert!(removals.result_of(&dir("small"), &remove).unwrap().is_ok());
        assert!(removals.result_of(&dir("large"), &remove).is_none());
        removals.next_finished().await;
        assert!(removals.result_of(&dir("large"), &remove).unwrap().is_ok());
        assert!(removals.next_finished().now_or_never().is_none());
    }
}
