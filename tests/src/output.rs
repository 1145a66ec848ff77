//! The exit code and output of a command.

use std::fmt;

/// The result of a command that has exited.
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
    pub fn exited_with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "exit code{self}");
        self
    }

    /// Asserts that the exit code is 0.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        self.exited_with(0)
    }

    /// Asserts that standard error contains all of these texts.
    #[track_caller]
    pub fn stderr_has(self, texts: &[&str]) -> Self {
        for text in texts {
            assert!(
                self.stderr.contains(text),
                "stderr should contain {text:?}{self}"
            );
        }
        self
    }

    /// Asserts that standard output is exactly this text, except for surrounding white space.
    #[track_caller]
    pub fn stdout_is(self, text: &str) -> Self {
        assert_eq!(self.stdout.trim(), text.trim(), "standard output{self}");
        self
    }

    /// Asserts that standard output contains all of these texts.
    #[track_caller]
    pub fn stdout_has(self, texts: &[&str]) -> Self {
        for text in texts {
            assert!(
                self.stdout.contains(text),
                "stdout should contain {text:?}{self}"
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
