//! Progress of a pull: a bar for each layer.

use console::say;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use images::{Digest, PullEvent, PullProgress};

use console::{DownloadProgress, FileProgress};

/// Bars on a terminal, plain lines otherwise.
#[derive(Debug)]
pub struct Bars {
    all: DownloadProgress,
    blobs: Mutex<HashMap<Digest, FileProgress>>,
}

impl Bars {
    /// Shows nothing until the first event.
    pub fn new() -> Bars {
        Bars {
            all: DownloadProgress::new(),
            blobs: Mutex::default(),
        }
    }
}

/// A short form of the digest, long enough to distinguish layers.
fn name(blob: &Digest) -> String {
    blob.hex()[..12].to_owned()
}

impl PullProgress for Bars {
    fn event(&self, event: PullEvent) {
        let mut blobs = self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let PullEvent::Waiting { blob } | PullEvent::Begin { blob, .. } = &event {
            let new = || self.all.file(&name(blob));
            blobs.entry(*blob).or_insert_with(new);
        }
        let mut with = |blob: Digest, change: &dyn Fn(&mut FileProgress)| {
            blobs.get_mut(&blob).map(change);
        };
        match event {
            PullEvent::Waiting { blob } => {
                with(blob, &|bar| {
                    bar.note("another coracle downloads it; waiting")
                });
            }
            PullEvent::Begin { blob, at, total } => with(blob, &|bar| bar.begin(at, Some(total))),
            PullEvent::Advance { blob, at } => with(blob, &|bar| bar.advance(at)),
            PullEvent::Downloaded { blob, size } => {
                if let Some(bar) = blobs.remove(&blob) {
                    bar.finish(size);
                }
            }
            PullEvent::Unpacking { .. } | PullEvent::Unpacked { .. } => {}
            PullEvent::Note { text } => match blobs.values().next() {
                Some(bar) => bar.note(&text),
                None => say(format_args!("{text}")),
            },
        }
    }
}
