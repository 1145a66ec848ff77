//! The phases of a command, with the time each took: a spinner on a terminal, plain lines otherwise.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::print_stderr;
use indicatif::{ProgressBar, ProgressStyle};

/// The phases of one command.
#[derive(Debug)]
pub struct Phases {
    began: Instant,
    phase: Option<(String, Instant)>,
    spinner: Option<ProgressBar>,
}

impl Phases {
    /// Starts the clock of the whole command.
    #[must_use]
    #[allow(
        clippy::new_without_default,
        reason = "`new` starts a clock, which `default` should not do"
    )]
    pub fn new() -> Self {
        let spinner = std::io::stderr().is_terminal().then(|| {
            let spinner = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
                spinner.set_style(style);
            }
            spinner
        });
        Self {
            began: Instant::now(),
            phase: None,
            spinner,
        }
    }

    /// Ends the current phase, if any, and begins the next.
    pub fn begin(&mut self, name: impl Into<String>) {
        self.end();
        let name = name.into();
        if let Some(spinner) = &self.spinner {
            spinner.set_message(name.clone());
            spinner.enable_steady_tick(Duration::from_millis(100));
        }
        self.phase = Some((name, Instant::now()));
    }

    /// Ends the current phase and prints how long it took.
    pub fn end(&mut self) {
        if let Some((name, began)) = self.phase.take() {
            self.print(&format!("{name} ({})", seconds(began.elapsed())));
        }
    }

    /// Discards the current phase without printing it, and removes the spinner.
    pub fn cancel(&mut self) {
        self.phase = None;
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }

    /// Ends the current phase, and prints `message` with the total time, and `detail` unless it is empty. Removes the spinner,
    /// because the workload may now write to the terminal.
    pub fn finish(&mut self, message: &str, detail: &str) {
        self.end();
        let time = seconds(self.began.elapsed());
        let separator = if detail.is_empty() { "" } else { ": " };
        self.print(&format!("{message} after {time}{separator}{detail}"));
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }

    /// Prints a line above the spinner.
    pub fn print(&self, text: &str) {
        match &self.spinner {
            Some(spinner) => spinner.suspend(|| print_stderr(format_args!("coracle: {text}"))),
            None => print_stderr(format_args!("coracle: {text}")),
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
