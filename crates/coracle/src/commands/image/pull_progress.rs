//! Progress of a pull: a bar for each layer.

use console::print_stderr;
use std::collections::HashMap;
use std::sync::Mutex;

use images::{Digest, PullEvent, PullProgress};

use console::{DownloadProgress, FileProgress};

/// Shows bars on a terminal, plain lines otherwise.
#[derive(Debug)]
pub struct PullProgressBars {
    progress: DownloadProgress,
    blobs: Mutex<HashMap<Digest, FileProgress>>,
}

impl PullProgressBars {
    /// Shows nothing until the first event.
    pub fn new() -> PullProgressBars {
        PullProgressBars {
            progress: DownloadProgress::on_stderr(),
            blobs: Mutex::default(),
        }
    }
}

/// A short form of the digest, long enough to distinguish layers.
fn short_name(blob: &Digest) -> String {
    blob.hex()[..12].to_owned()
}

impl PullProgress for PullProgressBars {
    fn event(&self, event: PullEvent) {
        let mut blobs = self.blobs.lock().unwrap();
        if let PullEvent::Waiting { blob } | PullEvent::Begin { blob, .. } = &event {
            let new = || self.progress.file(&short_name(blob));
            blobs.entry(*blob).or_insert_with(new);
        }
        let mut update = |blob: Digest, change: &dyn Fn(&mut FileProgress)| {
            blobs.get_mut(&blob).map(change);
        };
        match event {
            PullEvent::Waiting { blob } => {
                update(blob, &|bar| {
                    bar.note("another coracle downloads it; waiting")
                });
            }
            PullEvent::Begin { blob, at, total } => update(blob, &|bar| bar.begin(at, Some(total))),
            PullEvent::Advance { blob, at } => update(blob, &|bar| bar.advance(at)),
            PullEvent::Downloaded { blob, size } => {
                if let Some(bar) = blobs.remove(&blob) {
                    bar.finish(size);
                }
            }
            PullEvent::Unpacking { .. } | PullEvent::Unpacked { .. } => {}
            PullEvent::Note { text } => match blobs.values().next() {
                Some(bar) => bar.note(&text),
                None => print_stderr(format_args!("{text}")),
            },
        }
    }
}
