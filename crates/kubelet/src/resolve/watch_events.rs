//! Watches API objects, with retries.

use std::fmt::Debug;
use std::time::Duration;

use futures::TryStreamExt;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use crate::backoff::ExponentialBackoff;

/// Watches objects and calls `handle` for each event. Logs errors, with `objects` as the name of what is watched, and retries.
/// Returns only if the stream ends.
pub(super) async fn watch_events<K>(
    api: Api<K>,
    config: watcher::Config,
    max_retry_delay: Duration,
    objects: &str,
    mut handle: impl FnMut(watcher::Event<K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let events = watcher(api, config).backoff(ExponentialBackoff::up_to(max_retry_delay));
    tokio::pin!(events);
    loop {
        match events.try_next().await {
            Ok(Some(event)) => handle(event),
            Ok(None) => return,
            Err(error) => tracing::debug!(
                error = &error as &dyn std::error::Error,
                objects,
                "cannot watch objects"
            ),
        }
    }
}
