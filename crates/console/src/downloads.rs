//! Progress of downloads: bars on a terminal, plain lines elsewhere (a job's log).

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::say;
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

/// Interval between lines for a slow download.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// The progress of a set of files.
#[derive(Debug)]
pub struct DownloadProgress {
    bars: Option<MultiProgress>,
}

/// The progress of one file.
#[derive(Debug)]
pub struct FileProgress {
    name: String,
    started: Instant,
    total: Option<u64>,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Bar(MultiProgress, Option<ProgressBar>),
    Lines { last: Instant },
}

impl DownloadProgress {
    /// Bars if stderr is a terminal.
    #[must_use]
    pub fn new() -> Self {
        Self {
            bars: std::io::stderr().is_terminal().then(MultiProgress::new),
        }
    }

    /// Adds a file; nothing is shown before [`FileProgress::begin`].
    pub fn file(&self, name: &str) -> FileProgress {
        let shown = match &self.bars {
            Some(bars) => Shown::Bar(bars.clone(), None),
            None => Shown::Lines {
                last: Instant::now(),
            },
        };
        FileProgress {
            name: name.to_owned(),
            started: Instant::now(),
            total: None,
            shown,
        }
    }
}

impl FileProgress {
    /// Data begins to arrive, at position `at` of `total`.
    pub fn begin(&mut self, at: u64, total: Option<u64>) {
        self.show(at, total);
        if let Shown::Lines { .. } = &self.shown {
            let size = total.map_or_else(String::new, |total| format!(" {}", HumanBytes(total)));
            match at {
                0 => say(format_args!("{}: downloading{size}", self.name)),
                at => say(format_args!(
                    "{}: resuming at {} of{size}",
                    self.name,
                    HumanBytes(at)
                )),
            }
        }
    }

    /// The same for an operation that is usually short: prints no line where there are no bars.
    pub fn begin_quietly(&mut self, total: Option<u64>) {
        self.show(0, total);
    }

    fn show(&mut self, at: u64, total: Option<u64>) {
        self.total = total;
        match &mut self.shown {
            Shown::Bar(bars, bar) => {
                let bar = bar.get_or_insert_with(|| {
                    let bar = ProgressBar::no_length()
                        .with_style(bar_style())
                        .with_prefix(self.name.clone());
                    bars.add(bar)
                });
                if let Some(total) = total {
                    bar.set_length(total);
                }
                bar.set_position(at);
                bar.reset_eta();
            }
            Shown::Lines { last } => *last = Instant::now(),
        }
    }

    /// Shows that the file has grown to `at` bytes.
    pub fn advance(&mut self, at: u64) {
        match &mut self.shown {
            Shown::Bar(_, bar) => bar.iter().for_each(|bar| bar.set_position(at)),
            Shown::Lines { last } if last.elapsed() >= LINE_EVERY => {
                *last = Instant::now();
                match self.total {
                    Some(total) => {
                        let percent = at.saturating_mul(100) / total.max(1);
                        say(format_args!(
                            "{}: {} of {} ({percent} %)",
                            self.name,
                            HumanBytes(at),
                            HumanBytes(total)
                        ));
                    }
                    None => say(format_args!("{}: {}", self.name, HumanBytes(at))),
                }
            }
            Shown::Lines { .. } => {}
        }
    }

    /// Prints a message, such as a broken connection.
    pub fn note(&self, text: &str) {
        match &self.shown {
            Shown::Bar(bars, _) => {
                let _ = bars.println(format!("{}: {text}", self.name));
            }
            Shown::Lines { .. } => say(format_args!("{}: {text}", self.name)),
        }
    }

    /// Removes the bar of a download that failed.
    pub fn clear(&mut self) {
        if let Shown::Bar(_, Some(bar)) = &self.shown {
            bar.finish_and_clear();
        }
    }

    /// Shows that the file is complete and verified.
    pub fn finish(self, size: u64) {
        match self.shown {
            Shown::Bar(_, bar) => bar.iter().for_each(|bar| {
                bar.set_length(size);
                bar.finish();
            }),
            Shown::Lines { .. } => {
                let took = self.started.elapsed().as_secs_f64();
                say(format_args!(
                    "{}: {}, checksum good, {took:.1} s",
                    self.name,
                    HumanBytes(size)
                ));
            }
        }
    }
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template(
        "{prefix:30!} {bar:26} {bytes:>11} of {total_bytes:<11} {bytes_per_sec:>12} {eta:>4}",
    )
    .unwrap_or_else(|_| ProgressStyle::default_bar())
}
