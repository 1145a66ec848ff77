//! When kubelets are asked: if somebody wants to know, and what is known is old.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::kubelets::Source;
use crate::rates::{Now, Snapshot};

/// Figures are not asked for again sooner; autoscalers ask as often as this.
const FRESH: Duration = Duration::from_secs(15);
/// A look that is older says nothing about now.
const OLDEST: Duration = Duration::from_secs(90);
/// Then two looks are taken, with this between them.
const BETWEEN: Duration = Duration::from_millis(1500);

/// What is known of what is used.
pub(crate) struct Usages<S> {
    source: S,
    known: Mutex<Option<Known>>,
}

struct Known {
    /// The newest look, and when it was taken.
    newest: Snapshot,
    taken: Instant,
    now: Arc<Now>,
}

impl<S: Source> Usages<S> {
    pub(crate) fn new(source: S) -> Self {
        Self {
            source,
            known: Mutex::default(),
        }
    }

    /// What is used now. Those who ask while kubelets are being asked get the same answer.
    pub(crate) async fn now(&self) -> Arc<Now> {
        let mut known = self.known.lock().await;
        if let Some(known) = known.as_ref().filter(|known| known.taken.elapsed() < FRESH) {
            return Arc::clone(&known.now);
        }
        let earlier = match known.take() {
            Some(known) if known.taken.elapsed() <= OLDEST => known.newest,
            _ => {
                let first = self.look().await;
                tokio::time::sleep(BETWEEN).await;
                first
            }
        };
        let newest = self.look().await;
        let now = Arc::new(newest.since(&earlier));
        *known = Some(Known {
            newest,
            taken: Instant::now(),
            now: Arc::clone(&now),
        });
        now
    }

    async fn look(&self) -> Snapshot {
        Snapshot::of(self.source.summaries().await)
    }

    /// The cluster itself.
    pub(crate) fn source(&self) -> &S {
        &self.source
    }
}
