//! Writes lines of containers to standard output and to files. One task writes, so that lines of different containers do not mix.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use console::print_stderr;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::line::{LinePiece, printable_lines};
use super::{ContainerKey, files};

/// Capacity of the queue to the writing task. A full queue blocks the log streams, so memory is bounded if standard output blocks.
const QUEUED_CHUNKS: usize = 32;
/// Limit on the length of a container's last line in the summary.
const MAX_LAST_LINE_CHARS: usize = 200;
/// Colours of prefixes: readable on dark and light backgrounds.
const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];

/// How logs are shown and kept.
#[derive(Debug, Clone, Default)]
pub struct LogStyle {
    /// Print logs on standard output.
    pub prints: bool,
    /// Begin each line with the names of pod and container.
    pub has_prefix: bool,
    /// Include the namespace in the prefix.
    pub shows_namespace: bool,
    pub is_coloured: bool,
    /// Keep each container's log below this directory.
    pub dir: Option<PathBuf>,
}

/// The last lines of containers, for the summary.
pub type LastLines = Arc<Mutex<HashMap<(String, String, String), String>>>;

/// Lines of one container.
pub struct LogChunk {
    pub container: Arc<ContainerKey>,
    pub pieces: Vec<LinePiece>,
}

/// The queue to the writing task. Cloned by each stream.
#[derive(Clone)]
pub struct LogOutput(mpsc::Sender<LogChunk>);

impl LogOutput {
    /// Starts the writing task.
    pub fn start(style: LogStyle, last_lines: LastLines) -> (Self, LogWriter) {
        let (sender, chunks) = mpsc::channel(QUEUED_CHUNKS);
        let task = tokio::spawn(write_chunks(chunks, style, last_lines));
        (Self(sender), LogWriter(task))
    }

    /// Queues lines of a container.
    pub async fn write(&self, container: &Arc<ContainerKey>, pieces: Vec<LinePiece>) {
        if !pieces.is_empty() {
            let container = Arc::clone(container);
            let _ = self.0.send(LogChunk { container, pieces }).await;
        }
    }
}

/// The writing task. It ends when all clones of its queue are dropped.
pub struct LogWriter(JoinHandle<()>);

impl LogWriter {
    /// Waits until everything is written, for at most `timeout`.
    pub async fn finish(mut self, timeout: Duration) {
        if tokio::time::timeout(timeout, &mut self.0).await.is_err() {
            self.0.abort();
        }
    }
}

async fn write_chunks(
    mut chunks: mpsc::Receiver<LogChunk>,
    mut style: LogStyle,
    last_lines: LastLines,
) {
    let mut stdout = tokio::io::stdout();
    while let Some(LogChunk { container, pieces }) = chunks.recv().await {
        if let Some(line) = last_line(&pieces) {
            let mut lines = last_lines.lock().unwrap_or_else(PoisonError::into_inner);
            lines.insert(container.names(), line);
        }
        if let Some(dir) = style.dir.clone() {
            let (container, bytes) = (Arc::clone(&container), raw_bytes(&pieces));
            let appended =
                tokio::task::spawn_blocking(move || files::append(&dir, &container, &bytes)).await;
            if let Ok(Err(error)) = appended {
                print_stderr(format_args!(
                    "coracle: warning: the logs of pods are not kept any more: {error} (hint: check the space in the directory of --logs)"
                ));
                style.dir = None;
            }
        }
        if style.prints {
            let text = shown_text(&container, &pieces, &style);
            let written = async {
                stdout.write_all(text.as_bytes()).await?;
                stdout.flush().await
            };
            // Stop printing if the pipe is closed (`coracle run app.yaml | head`); the workload continues.
            style.prints = written.await.is_ok();
        }
    }
}

/// The lines as shown to the user.
fn shown_text(container: &ContainerKey, pieces: &[LinePiece], style: &LogStyle) -> String {
    let prefix = prefix(container, style);
    let mut text = String::new();
    for line in pieces.iter().flat_map(|piece| printable_lines(&piece.text)) {
        text.push_str(&prefix);
        text.push_str(&line);
        text.push('\n');
    }
    text
}

fn prefix(container: &ContainerKey, style: &LogStyle) -> String {
    let ContainerKey {
        namespace,
        pod,
        container,
        ..
    } = container;
    if !style.has_prefix {
        return String::new();
    }
    let names = if style.shows_namespace {
        format!("{namespace}/{pod}/{container}")
    } else {
        format!("{pod}/{container}")
    };
    if !style.is_coloured {
        return format!("{names} ");
    }
    let mut hasher = DefaultHasher::new();
    names.hash(&mut hasher);
    let index = usize::try_from(hasher.finish() % COLOURS.len() as u64).unwrap_or(0);
    format!("\x1b[{}m{names}\x1b[0m ", COLOURS[index])
}

/// The log as the container wrote it.
fn raw_bytes(pieces: &[LinePiece]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        bytes.extend_from_slice(&piece.text);
        if piece.ends_line {
            bytes.push(b'\n');
        }
    }
    bytes
}

/// The last line that is not blank, shortened.
fn last_line(pieces: &[LinePiece]) -> Option<String> {
    let shortened = |text: String| {
        let text = text.trim();
        match text.char_indices().nth(MAX_LAST_LINE_CHARS) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text.to_owned(),
        }
    };
    let lines = pieces
        .iter()
        .rev()
        .filter_map(|piece| printable_lines(&piece.text).pop());
    lines.map(shortened).find(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container() -> ContainerKey {
        ContainerKey {
            namespace: "n".to_owned(),
            pod: "p".to_owned(),
            uid: "u".to_owned(),
            container: "c".to_owned(),
        }
    }

    fn piece(text: &str) -> LinePiece {
        LinePiece {
            text: text.as_bytes().to_vec(),
            starts_line: true,
            ends_line: true,
        }
    }

    fn plain() -> LogStyle {
        LogStyle {
            prints: true,
            has_prefix: true,
            ..LogStyle::default()
        }
    }

    #[test]
    fn each_line_has_the_chosen_prefix() {
        let pieces = [piece("one"), piece("10%\r20%"), piece("")];
        let shown = |style| shown_text(&container(), &pieces, &style);
        assert_eq!(shown(plain()), "p/c one\np/c 10%\np/c 20%\np/c \n");
        let style = LogStyle {
            shows_namespace: true,
            ..plain()
        };
        assert!(shown(style).starts_with("n/p/c one\n"));
        let style = LogStyle {
            has_prefix: false,
            ..plain()
        };
        assert_eq!(shown(style), "one\n10%\n20%\n\n");
        let style = LogStyle {
            is_coloured: true,
            ..plain()
        };
        let coloured = shown(style);
        assert!(coloured.starts_with("\x1b["), "{coloured:?}");
        assert!(coloured.contains("mp/c\x1b[0m one\n"), "{coloured:?}");
    }

    #[test]
    fn file_keeps_bytes_unchanged() {
        let long = LinePiece {
            ends_line: false,
            ..piece("a\x1b[31m")
        };
        assert_eq!(
            raw_bytes(&[long, piece("b\r"), piece("")]),
            b"a\x1b[31mb\r\n\n"
        );
    }

    #[test]
    fn last_line_is_short_and_not_blank() {
        assert_eq!(
            last_line(&[piece("first"), piece("last "), piece("  ")]).as_deref(),
            Some("last")
        );
        assert_eq!(last_line(&[piece("")]), None);
        let long = last_line(&[piece(&"é".repeat(5000))]).unwrap();
        assert_eq!(long.chars().count(), MAX_LAST_LINE_CHARS + 1);
    }
}
