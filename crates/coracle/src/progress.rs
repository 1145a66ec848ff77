//! Tells the user what is happening, by phase, with the time each took: a spinner on a terminal, plain
//! lines otherwise. Everything goes to standard error; standard output belongs to the workload.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::say::say;
use indicatif::{ProgressBar, ProgressStyle};

/// The phases of one command.
#[derive(Debug)]
pub struct Progress {
    began: Instant,
    phase: Option<(String, Instant)>,
    spinner: Option<ProgressBar>,
}

impl Progress {
    /// Nothing has been done yet.
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

    /// A new phase begins; the one before it, if any, is done.
    pub fn phase(&mut self, name: impl Into<String>) {
        self.done();
        let name = name.into();
        if let Some(spinner) = &self.spinner {
            spinner.set_message(name.clone());
            spinner.enable_steady_tick(Duration::from_millis(100));
        }
        self.phase = Some((name, Instant::now()));
    }

    /// The current phase is done.
    pub fn done(&mut self) {
        if let Some((name, began)) = self.phase.take() {
            self.line(&format!("{name} ({})", seconds(began.elapsed())));
        }
    }

    /// The current phase ended early, and nothing is said of it.
    pub fn abandon(&mut self) {
        self.phase = None;
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }

    /// Everything is ready: the spinner makes way for the workload.
    pub fn ready(&mut self, what: &str) {
        self.done();
        self.line(&format!("{what} after {}", seconds(self.began.elapsed())));
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }

    /// A line of its own.
    pub fn line(&self, text: &str) {
        match &self.spinner {
            Some(spinner) => spinner.suspend(|| say(format_args!("coracle: {text}"))),
            None => say(format_args!("coracle: {text}")),
        }
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
