//! What a command left: its exit code and what it wrote.

use std::fmt;

/// A command that has ended.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// Its exit code, as a shell counts it: 128 and the signal's number if one ended it.
    pub code: i32,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

impl Output {
    /// It ended with this code.
    #[track_caller]
    pub fn ended_with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "exit code{self}");
        self
    }

    /// It ended with 0.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        self.ended_with(0)
    }

    /// Standard error says all of this.
    #[track_caller]
    pub fn says(self, words: &[&str]) -> Self {
        for words in words {
            assert!(
                self.stderr.contains(words),
                "stderr should say {words:?}{self}"
            );
        }
        self
    }

    /// Standard output is exactly this, but for space around it.
    #[track_caller]
    pub fn printed(self, text: &str) -> Self {
        assert_eq!(self.stdout.trim(), text.trim(), "standard output{self}");
        self
    }

    /// Standard output has all of this in it.
    #[track_caller]
    pub fn shows(self, words: &[&str]) -> Self {
        for words in words {
            assert!(
                self.stdout.contains(words),
                "stdout should show {words:?}{self}"
            );
        }
        self
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\n--- exit code {}\n--- stdout\n{}\n--- stderr\n{}\n---",
            self.code, self.stdout, self.stderr
        )
    }
}
