//! How Coracle ends: its exit codes, and errors that say what to do next.
//!
//! A workload's own exit code is passed on as it is. Codes of Coracle itself follow `sysexits.h`, far
//! from those that programs usually choose; docs/exit-codes.md lists them.

use crate::say::say;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use rustix::process::Signal;

/// Why Coracle itself failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// The command line makes no sense.
    Usage = 64,
    /// The API server refused the manifests.
    BadManifest = 65,
    /// The workload can't be found or read.
    NoWorkload = 66,
    /// Slurm isn't there, doesn't answer or refused.
    Slurm = 69,
    /// A defect of Coracle.
    Internal = 70,
    /// This host lacks something that Coracle can't do without.
    Host = 71,
    /// No release of Kubernetes was found.
    NoKubernetes = 72,
    /// A file can't be written: no room, or no permission.
    CannotWrite = 73,
    /// An image can't be pulled, loaded or saved.
    NoImage = 74,
    /// The cluster did not come up.
    NotStarted = 75,
    /// The cluster broke while the workload ran.
    Broken = 76,
}

/// An error for the user: what happened, what to do next, and how the program ends.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    code: Code,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Failure {
    /// Something went wrong.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            code,
            source: None,
        }
    }

    /// What the user can do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same failure, at another time.
    pub fn with_code(mut self, code: Code) -> Self {
        self.code = code;
        self
    }

    /// What it was caused by.
    pub fn because(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
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

impl From<slurm::SlurmError> for Failure {
    fn from(error: slurm::SlurmError) -> Self {
        Self {
            message: error.to_string(),
            hint: error.hint().map(str::to_owned),
            code: Code::Slurm,
            source: match error {
                slurm::SlurmError::Start { source, .. } => Some(source.into()),
                _ => None,
            },
        }
    }
}

/// The code of this number.
pub fn code(number: i32) -> ExitCode {
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}

/// The number that a shell gives to what `signal` ended.
pub fn of_signal(signal: Signal) -> i32 {
    128 + signal.as_raw()
}

/// The number that a shell gives to a child's end.
pub fn of_child(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Tells the user about an error, on standard error, and chooses the exit code.
pub fn report(error: &anyhow::Error) -> ExitCode {
    say(format_args!("{}", describe(error)));
    let code = error.chain().find_map(code_of).unwrap_or(Code::Internal);
    ExitCode::from(code as u8)
}

fn code_of(cause: &(dyn std::error::Error + 'static)) -> Option<Code> {
    let failure = cause.downcast_ref::<Failure>().map(|failure| failure.code);
    failure
        .or_else(|| crate::kubernetes::code_of(cause))
        .or_else(|| crate::image::code_of(cause))
        .or_else(|| cause.downcast_ref().and_then(code_of_io))
}

/// What the system refuses for want of something is no defect of ours.
pub fn code_of_io(error: &std::io::Error) -> Option<Code> {
    use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    match error.kind() {
        StorageFull | QuotaExceeded | PermissionDenied | ReadOnlyFilesystem => {
            Some(Code::CannotWrite)
        }
        _ => match error
            .raw_os_error()
            .map(rustix::io::Errno::from_raw_os_error)?
        {
            rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOMEM => {
                Some(Code::Host)
            }
            _ => None,
        },
    }
}

/// The error with its causes, then the hints.
fn describe(error: &anyhow::Error) -> String {
    let mut text = format!("error: {error}");
    for cause in error.chain().skip(1) {
        text.push_str(&format!("\n  caused by: {cause}"));
    }
    for cause in error.chain() {
        if let Some(hint) = hint_of(cause) {
            text.push_str(&format!("\nhint: {hint}"));
        }
    }
    text
}

fn hint_of(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return failure.hint.clone();
    }
    cause
        .downcast_ref::<slurm::SlurmError>()
        .and_then(slurm::SlurmError::hint)
        .map(str::to_owned)
        .or_else(|| crate::kubernetes::hint_of(cause))
        .or_else(|| crate::image::hint_of(cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_and_hints_are_shown() {
        let failure = Failure::new(Code::NoWorkload, "cannot read app.yaml")
            .because(std::io::Error::from(std::io::ErrorKind::PermissionDenied))
            .hint("check its permissions");
        insta::assert_snapshot!(describe(&failure.into()));
    }
}
