//! Exit codes of Coracle, and error messages with hints.
//!
//! A workload's exit code is passed through unchanged. Coracle's own codes follow `sysexits.h`, away from the codes that
//! programs usually choose. docs/exit-codes.md lists them.

mod image_errors;
mod release_errors;

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use console::{Failure, FailureCode, print_stderr};
use rustix::process::Signal;

/// Converts a number to an exit code; 1 if it does not fit.
pub fn code(number: i32) -> ExitCode {
    ExitCode::from(u8::try_from(number).unwrap_or(1))
}

/// The exit code of a process killed by `signal`, as a shell reports it.
pub fn of_signal(signal: Signal) -> i32 {
    128 + signal.as_raw()
}

/// The exit code of a child, as a shell reports it.
pub fn of_child(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Prints an error on standard error and returns its exit code.
pub fn report(error: &anyhow::Error) -> ExitCode {
    print_stderr(format_args!("{}", describe(error)));
    let code = error
        .chain()
        .find_map(code_of)
        .unwrap_or(FailureCode::Internal);
    ExitCode::from(code as u8)
}

fn code_of(cause: &(dyn std::error::Error + 'static)) -> Option<FailureCode> {
    let failure = cause.downcast_ref::<Failure>().map(Failure::code);
    failure
        .or_else(|| release_errors::code_of(cause))
        .or_else(|| image_errors::code_of(cause))
        .or_else(|| cause.downcast_ref().and_then(code_of_io))
}

/// Maps I/O errors caused by the host or its disk (full, read-only, out of descriptors or memory) to their own exit codes, so
/// that they are not reported as internal errors.
fn code_of_io(error: &std::io::Error) -> Option<FailureCode> {
    use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    match error.kind() {
        StorageFull | QuotaExceeded | PermissionDenied | ReadOnlyFilesystem => {
            Some(FailureCode::CannotWrite)
        }
        _ => match error
            .raw_os_error()
            .map(rustix::io::Errno::from_raw_os_error)?
        {
            rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOMEM => {
                Some(FailureCode::Host)
            }
            _ => None,
        },
    }
}

/// Formats the error, its causes, and the hints.
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
        return failure.hint().map(str::to_owned);
    }
    cause
        .downcast_ref::<slurm::SlurmError>()
        .and_then(slurm::SlurmError::hint)
        .map(str::to_owned)
        .or_else(|| release_errors::hint_of(cause))
        .or_else(|| image_errors::hint_of(cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_and_hints_are_shown() {
        let failure = Failure::new(FailureCode::NoWorkload, "cannot read app.yaml")
            .with_source(std::io::Error::from(std::io::ErrorKind::PermissionDenied))
            .with_hint("check its permissions");
        insta::assert_snapshot!(describe(&failure.into()));
    }
}
