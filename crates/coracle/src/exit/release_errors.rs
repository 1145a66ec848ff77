//! Exit codes and hints for errors about releases of Kubernetes.

use std::error::Error;

use console::FailureCode;
use releases::{FetchError, ImportError, ReleaseError};

/// A hint for errors about releases.
pub fn hint_of(cause: &(dyn Error + 'static)) -> Option<String> {
    let release = || cause.downcast_ref().and_then(ReleaseError::hint);
    let fetch = || cause.downcast_ref().and_then(FetchError::hint);
    let import = || cause.downcast_ref().and_then(ImportError::hint);
    release().or_else(fetch).or_else(import)
}

/// The exit code for errors about releases.
pub fn code_of(cause: &(dyn Error + 'static)) -> Option<FailureCode> {
    if cause.is::<ReleaseError>() {
        return Some(FailureCode::NoKubernetes);
    }
    if let Some(error) = cause.downcast_ref() {
        return Some(match error {
            FetchError::Version(_) | FetchError::Mirror { .. } => FailureCode::Usage,
            FetchError::Store(..) => FailureCode::CannotWrite,
            _ => FailureCode::NoKubernetes,
        });
    }
    Some(match cause.downcast_ref()? {
        ImportError::Store(_) => FailureCode::CannotWrite,
        _ => FailureCode::NoKubernetes,
    })
}
