//! Logging to standard error and, in a node's agent, also to memory, from where the kubelet API serves the node's log.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, OnceLock};

use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::LogLine;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::Filtered;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Size limit of the log in memory.
const MAX_MEMORY_BYTES: usize = 1 << 20;
/// The variable that overrides both log filters, in the syntax of `RUST_LOG`.
const FILTER_VARIABLE: &str = "CORACLE_LOG";
/// The kube client is off because it logs every failed connection attempt while the API server starts.
const STDERR_FILTER: &str = "warn,kube_client=off";
/// The log in memory is more verbose than standard error.
const MEMORY_FILTER: &str = "info,kube_client=off,coracle=debug,kubelet=debug,kubelet_api=debug";

static MEMORY_LOG: OnceLock<Mutex<LogRing>> = OnceLock::new();

/// Sets up logging; with `to_memory`, also to memory.
pub fn init(to_memory: bool) {
    let filter =
        |default: &str| EnvFilter::try_from_env(FILTER_VARIABLE).unwrap_or_else(|_| default.into());
    let stderr = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        // A write error, such as on a closed terminal, must not panic.
        .log_internal_errors(false);
    let memory: Option<Filtered<_, _, _>> = to_memory.then(|| {
        MEMORY_LOG.get_or_init(Mutex::default);
        tracing_subscriber::fmt::layer()
            .with_writer(MemoryWriter)
            .with_ansi(false)
            .with_filter(filter(MEMORY_FILTER))
    });
    tracing_subscriber::registry()
        .with(stderr.with_filter(filter(STDERR_FILTER)))
        .with(memory)
        .init();
}

/// The lines in memory, oldest first.
pub fn memory_log() -> Vec<LogLine> {
    let Some(ring) = MEMORY_LOG.get() else {
        return Vec::new();
    };
    let ring = ring.lock().unwrap();
    ring.lines.iter().cloned().collect()
}

/// A ring buffer of the newest log lines.
#[derive(Default)]
struct LogRing {
    lines: VecDeque<LogLine>,
    bytes: usize,
}

impl LogRing {
    fn push(&mut self, text: &str, at: Timestamp) {
        let text = text.trim_end().to_owned();
        self.bytes += text.len();
        self.lines.push_back(LogLine { at, text });
        while self.bytes > MAX_MEMORY_BYTES
            && let Some(oldest) = self.lines.pop_front()
        {
            self.bytes -= oldest.text.len();
        }
    }
}

/// Writes each event, which arrives as one `write` call, to the ring buffer.
#[derive(Clone, Copy)]
struct MemoryWriter;

impl Write for MemoryWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(ring) = MEMORY_LOG.get() {
            let mut ring = ring.lock().unwrap();
            ring.push(&String::from_utf8_lossy(bytes), Timestamp::now());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for MemoryWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_in_memory_is_bounded() {
        let mut ring = LogRing::default();
        let long = "x".repeat(MAX_MEMORY_BYTES / 4);
        for index in 0..10 {
            ring.push(&format!("{index}{long}\n"), Timestamp::UNIX_EPOCH);
        }
        assert_eq!(ring.lines.len(), 3);
        assert!(ring.lines[0].text.starts_with('7') && ring.lines[2].text.starts_with('9'));
        assert!(ring.bytes <= MAX_MEMORY_BYTES);
    }
}
