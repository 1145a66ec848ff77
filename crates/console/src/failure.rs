//! Errors for the user.

use std::fmt;

/// Exit codes of Coracle itself, after `sysexits.h`; docs/exit-codes.md lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FailureCode {
    /// The command line is invalid.
    Usage = 64,
    /// The manifests are invalid, or the API server refused them.
    BadManifest = 65,
    /// The workload cannot be found or read.
    NoWorkload = 66,
    /// Slurm is missing, does not respond, or refused.
    Slurm = 69,
    /// A bug in Coracle.
    Internal = 70,
    /// This host lacks something that Coracle requires.
    Host = 71,
    /// No release of Kubernetes was found.
    NoKubernetes = 72,
    /// A file cannot be written: no space, or no permission.
    CannotWrite = 73,
    /// An image cannot be pulled, loaded or saved.
    NoImage = 74,
    /// The cluster did not come up.
    NotStarted = 75,
    /// The cluster broke while the workload ran.
    Broken = 76,
    /// Pods could not run for the time of `--give-up-after`.
    GaveUp = 77,
}

/// An error for the user: a message, a hint what to do next, and the exit code.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    code: FailureCode,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Failure {
    /// An error with neither hint nor source.
    pub fn new(code: FailureCode, message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            code,
            source: None,
        }
    }

    /// Adds a hint for the user.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Replaces the exit code.
    pub fn with_code(mut self, code: FailureCode) -> Self {
        self.code = code;
        self
    }

    /// Adds the error that caused this one.
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The exit code.
    pub fn code(&self) -> FailureCode {
        self.code
    }

    /// The hint for the user, if there is one.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
