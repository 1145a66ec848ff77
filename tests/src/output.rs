//! The exit code and output of a command.

use std::fmt;

/// A command that has ended.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// Its exit code as in a shell: 128 plus the signal's number if a signal killed it.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Output {
    /// Asserts that the exit code is `code`.
    #[track_caller]
    pub fn ended_with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "exit code{self}");
        self
    }

    /// Asserts that the exit code is 0.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        self.ended_with(0)
    }

    /// Asserts that standard error contains all of these texts.
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

    /// Asserts that standard output is exactly this text, except for surrounding white space.
    #[track_caller]
    pub fn printed(self, text: &str) -> Self {
        assert_eq!(self.stdout.trim(), text.trim(), "standard output{self}");
        self
    }

    /// Asserts that standard output contains all of these texts.
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
