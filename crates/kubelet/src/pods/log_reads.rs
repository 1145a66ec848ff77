//! Recent reads of complete logs, so that a client that reads a container's log and then attaches to it sees all output once.
//!
//! `kubectl run -i` does that. What the container prints between the two requests would be lost. If the container ends between
//! them and attach fails, kubectl reads the log again, from the start of the current second, and prints lines twice. So an attach
//! soon after a read continues where the read has ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use kubelet_api::{ContainerLogStream, LogOptions, LogStream};
use tokio::time::Instant;

/// An attach that comes later is not related to the read.
const MAX_AGE: Duration = Duration::from_secs(5);

/// The newest complete read of each container's log, by the pod's uid and the container's name.
#[derive(Debug, Default)]
pub(super) struct LogReads(Mutex<HashMap<(String, String), LogRead>>);

#[derive(Debug)]
struct LogRead {
    ended: Instant,
    bytes: u64,
    /// The id of the container at that time.
    container_id: Option<String>,
}

impl LogReads {
    /// Records this read when it ends, if it is one of a complete log.
    pub(super) fn observe(
        self: &Arc<Self>,
        uid: &str,
        options: &LogOptions,
        container_id: Option<String>,
        log: ContainerLogStream,
    ) -> ContainerLogStream {
        if !is_complete(options) {
            return log;
        }
        let (reads, key) = (
            Arc::clone(self),
            (uid.to_owned(), options.container.clone()),
        );
        let (mut bytes, mut is_whole) = (0, true);
        log.map(Some)
            .chain(futures::stream::once(async { None }))
            .filter_map(move |item| {
                match &item {
                    Some(Ok(more)) => bytes += more.len() as u64,
                    Some(Err(_)) => is_whole = false,
                    None if is_whole => reads.insert(key.clone(), bytes, container_id.clone()),
                    None => {}
                }
                std::future::ready(item)
            })
            .boxed()
    }

    fn insert(&self, key: (String, String), bytes: u64, container_id: Option<String>) {
        let mut reads = self.0.lock().unwrap();
        reads.retain(|_, read| read.ended.elapsed() < MAX_AGE);
        let read = LogRead {
            ended: Instant::now(),
            bytes,
            container_id,
        };
        reads.insert(key, read);
    }

    /// Whether a client has just read this container's log.
    pub(super) fn is_recent(&self, uid: &str, container: &str) -> bool {
        let reads = self.0.lock().unwrap();
        let read = reads.get(&(uid.to_owned(), container.to_owned()));
        read.is_some_and(|read| read.ended.elapsed() < MAX_AGE)
    }

    /// The number of bytes of the container's log that a client has just read. Only the first attach after the read gets it.
    pub(super) fn take(
        &self,
        uid: &str,
        container: &str,
        container_id: Option<&str>,
    ) -> Option<u64> {
        let mut reads = self.0.lock().unwrap();
        let read = reads.remove(&(uid.to_owned(), container.to_owned()))?;
        let is_recent = read.ended.elapsed() < MAX_AGE;
        // The client has read nothing of a container that was restarted since.
        let is_same = read.container_id.as_deref() == container_id;
        is_recent.then_some(if is_same { read.bytes } else { 0 })
    }
}

/// Whether a request reads a log from its start to its current end, as text.
fn is_complete(options: &LogOptions) -> bool {
    let LogOptions {
        container: _,
        previous,
        follow,
        tail_lines,
        since,
        timestamps,
        limit_bytes,
        stream,
    } = options;
    !(*previous || *follow || *timestamps)
        && tail_lines.is_none()
        && since.is_none()
        && limit_bytes.is_none()
        && *stream == LogStream::All
}

/// The options of a read that continues a complete one, until the container's end.
pub(super) fn rest_options(container: String) -> LogOptions {
    LogOptions {
        container,
        previous: false,
        follow: true,
        tail_lines: None,
        since: None,
        timestamps: false,
        limit_bytes: None,
        stream: LogStream::All,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn complete() -> LogOptions {
        LogOptions {
            follow: false,
            ..rest_options("c".to_owned())
        }
    }

    async fn read(reads: &Arc<LogReads>, options: &LogOptions) {
        let chunks = ["one", "two"].map(|text| Ok(Bytes::from(text)));
        let log = futures::stream::iter(chunks).boxed();
        let seen = reads.observe("u", options, Some("1".to_owned()), log);
        assert_eq!(seen.count().await, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn attach_continues_after_recent_complete_read() {
        let reads = Arc::<LogReads>::default();
        assert_eq!(reads.take("u", "c", Some("1")), None);
        read(&reads, &complete()).await;
        assert!(reads.is_recent("u", "c") && !reads.is_recent("u", "d"));
        assert_eq!(reads.take("u", "c", Some("1")), Some(6));
        assert_eq!(reads.take("u", "c", Some("1")), None);
        // A restarted container has a new log.
        read(&reads, &complete()).await;
        assert_eq!(reads.take("u", "c", Some("2")), Some(0));
        read(&reads, &complete()).await;
        tokio::time::advance(MAX_AGE).await;
        assert!(!reads.is_recent("u", "c"));
        assert_eq!(reads.take("u", "c", Some("1")), None);
    }

    #[tokio::test]
    async fn partial_reads_are_not_recorded() {
        let reads = Arc::<LogReads>::default();
        let tail = LogOptions {
            tail_lines: Some(1),
            ..complete()
        };
        read(&reads, &tail).await;
        read(&reads, &rest_options("c".to_owned())).await;
        assert!(!reads.is_recent("u", "c"));
        // A read that was not finished.
        let log = futures::stream::iter([Ok(Bytes::from("one"))]).boxed();
        let mut seen = reads.observe("u", &complete(), None, log);
        seen.next().await;
        drop(seen);
        assert!(!reads.is_recent("u", "c"));
    }
}
