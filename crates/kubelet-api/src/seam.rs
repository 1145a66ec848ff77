//! What this API asks of the kubelet.

use std::error::Error;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

/// Where this API learns which pods the node has, and what they wrote: the seam to the kubelet.
pub trait PodSource: Send + Sync {
    /// The pods bound to this node, each with the newest status that the kubelet knows, written to the API or not.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// The log of a container of the pod with this uid, from its start or as `options` say.
    ///
    /// Asked only for containers that [`pods`](Self::pods) shows as started. The stream ends with the log, and with
    /// `follow` when the container has ended. An error becomes the answer's text.
    fn logs(&self, uid: &str, options: LogOptions) -> BoxFuture<'static, Result<LogBytes, NoLogs>>;
}

/// A log, as it comes.
pub type LogBytes = BoxStream<'static, io::Result<Bytes>>;

/// Why there is no log to show; its text, and that of its sources, goes to the caller.
pub type NoLogs = Box<dyn Error + Send + Sync>;

/// Which part of which container's log; upstream's `PodLogOptions`, understood and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The container, of any kind.
    pub container: String,
    /// The run before the newest one. A container that waits to be started again has no newer run than its last.
    pub previous: bool,
    /// Go on until the container ends.
    pub follow: bool,
    /// Only so many lines from the end.
    pub tail_lines: Option<u64>,
    /// Only what was written since then.
    pub since: Option<Timestamp>,
    /// Put the time before each line.
    pub timestamps: bool,
    /// At most so many bytes.
    pub limit_bytes: Option<u64>,
    /// Which of the container's outputs.
    pub stream: LogStream,
}

/// Which of a container's outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogStream {
    /// Both, as they were written.
    #[default]
    All,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}
