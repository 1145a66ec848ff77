//! Progress of downloads: bars on a terminal, plain lines elsewhere (a job's log).

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::print_stderr;
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

/// Interval between the lines that a slow download prints.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

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
    view: ProgressView,
}

#[derive(Debug)]
enum ProgressView {
    Bar(MultiProgress, Option<ProgressBar>),
    Lines { last: Instant },
}

impl DownloadProgress {
    /// Bars if stderr is a terminal.
    #[must_use]
    pub fn on_stderr() -> Self {
        Self {
            bars: std::io::stderr().is_terminal().then(MultiProgress::new),
        }
    }

    /// Adds a file; nothing is shown before [`FileProgress::begin`].
    pub fn file(&self, name: &str) -> FileProgress {
        let view = match &self.bars {
            Some(bars) => ProgressView::Bar(bars.clone(), None),
            None => ProgressView::Lines {
                last: Instant::now(),
            },
        };
        FileProgress {
            name: name.to_owned(),
            started: Instant::now(),
            total: None,
            view,
        }
    }
}

impl FileProgress {
    /// Shows that data begins to arrive, at byte `position` of `total`.
    pub fn begin(&mut self, position: u64, total: Option<u64>) {
        self.show(position, total);
        if let ProgressView::Lines { .. } = &self.view {
            let size = total.map_or_else(String::new, |total| format!(" {}", HumanBytes(total)));
            match position {
                0 => print_stderr(format_args!("{}: downloading{size}", self.name)),
                position => print_stderr(format_args!(
                    "{}: resuming at {} of{size}",
                    self.name,
                    HumanBytes(position)
                )),
            }
        }
    }

    /// As [`FileProgress::begin`], for an operation that is usually short: prints no line if there are no bars.
    pub fn begin_quietly(&mut self, total: Option<u64>) {
        self.show(0, total);
    }

    fn show(&mut self, position: u64, total: Option<u64>) {
        self.total = total;
        match &mut self.view {
            ProgressView::Bar(bars, bar) => {
                let bar = bar.get_or_insert_with(|| {
                    let bar = ProgressBar::no_length()
                        .with_style(bar_style())
                        .with_prefix(self.name.clone());
                    bars.add(bar)
                });
                if let Some(total) = total {
                    bar.set_length(total);
                }
                bar.set_position(position);
                bar.reset_eta();
            }
            ProgressView::Lines { last } => *last = Instant::now(),
        }
    }

    /// Shows that the file has grown to `position` bytes.
    pub fn advance(&mut self, position: u64) {
        match &mut self.view {
            ProgressView::Bar(_, bar) => bar.iter().for_each(|bar| bar.set_position(position)),
            ProgressView::Lines { last } if last.elapsed() >= LINE_INTERVAL => {
                *last = Instant::now();
                match self.total {
                    Some(total) => {
                        let percent = position.saturating_mul(100) / total.max(1);
                        print_stderr(format_args!(
                            "{}: {} of {} ({percent} %)",
                            self.name,
                            HumanBytes(position),
                            HumanBytes(total)
                        ));
                    }
                    None => print_stderr(format_args!("{}: {}", self.name, HumanBytes(position))),
                }
            }
            ProgressView::Lines { .. } => {}
        }
    }

    /// Prints a message, such as a broken connection.
    pub fn note(&self, text: &str) {
        match &self.view {
            ProgressView::Bar(bars, _) => {
                let _ = bars.println(format!("{}: {text}", self.name));
            }
            ProgressView::Lines { .. } => print_stderr(format_args!("{}: {text}", self.name)),
        }
    }

    /// Removes the bar of a download that failed.
    pub fn clear(&mut self) {
        if let ProgressView::Bar(_, Some(bar)) = &self.view {
            bar.finish_and_clear();
        }
    }

    /// Shows that the file is complete and verified.
    pub fn finish(self, size: u64) {
        match self.view {
            ProgressView::Bar(_, bar) => bar.iter().for_each(|bar| {
                bar.set_length(size);
                bar.finish();
            }),
            ProgressView::Lines { .. } => {
                let seconds = self.started.elapsed().as_secs_f64();
                print_stderr(format_args!(
                    "{}: {}, checksum good, {seconds:.1} s",
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
