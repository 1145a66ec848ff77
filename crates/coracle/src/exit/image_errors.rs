//! Exit codes and hints for errors about images.

use std::error::Error;

use console::FailureCode;
use images::archive::{LoadError, SaveError};
use images::registry::RegistryConfigError;
use images::{ImageError, ImageStoreError, ReferenceError};

/// A hint for errors about images.
pub fn hint_of(cause: &(dyn Error + 'static)) -> Option<String> {
    let hint = match store_error(cause) {
        Some(ImageStoreError::OutOfSpace { .. }) => Some(
            "make room with `coracle image prune`, or use another directory with `--store DIR`",
        ),
        _ if matches!(cause.downcast_ref(), Some(SaveError::Unknown(_))) => {
            Some("`coracle image ls` lists the images")
        }
        _ if matches!(
            cause.downcast_ref(),
            Some(LoadError::Empty | LoadError::NotTar(_) | LoadError::NoImage(_))
        ) =>
        {
            Some(
                "load an archive of `docker save`, `podman save` or `coracle image save`, or an OCI image layout; \
                 it may be compressed with gzip or zstd",
            )
        }
        _ => cause.downcast_ref().and_then(ImageError::hint),
    };
    hint.map(str::to_owned)
}

/// The exit code for errors about images.
pub fn code_of(cause: &(dyn Error + 'static)) -> Option<FailureCode> {
    match store_error(cause) {
        Some(ImageStoreError::OutOfSpace { .. }) => return Some(FailureCode::CannotWrite),
        Some(ImageStoreError::Io { source, .. }) => {
            return super::code_of_io(source).or(Some(FailureCode::NoImage));
        }
        Some(_) => return Some(FailureCode::NoImage),
        None => {}
    }
    let is_usage_error = cause.is::<ReferenceError>()
        || matches!(cause.downcast_ref(), Some(ImageError::InvalidName(_)))
        || matches!(cause.downcast_ref(), Some(LoadError::AmbiguousName(_)));
    if is_usage_error {
        return Some(FailureCode::Usage);
    }
    if let Some(SaveError::Write(_)) = cause.downcast_ref() {
        return Some(FailureCode::CannotWrite);
    }
    let is_image_error = cause.is::<ImageError>()
        || cause.is::<LoadError>()
        || cause.is::<SaveError>()
        || cause.is::<RegistryConfigError>();
    is_image_error.then_some(FailureCode::NoImage)
}

/// The store's error, if `cause` is one or wraps one transparently.
fn store_error<'a>(cause: &'a (dyn Error + 'static)) -> Option<&'a ImageStoreError> {
    let loading = match cause.downcast_ref() {
        Some(LoadError::Store(error)) => Some(error),
        _ => None,
    };
    let saving = match cause.downcast_ref() {
        Some(SaveError::Store(error)) => Some(error),
        _ => None,
    };
    let own = cause.downcast_ref::<ImageStoreError>();
    let image = cause.downcast_ref().and_then(ImageError::store);
    own.or(loading).or(saving).or(image)
}
