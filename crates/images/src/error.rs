//! Why an image can't be had, in the words and with the reasons that Kubernetes has for it.

use std::error::Error;

use crate::layers::LayerError;
use crate::manifest::DocumentError;
use crate::reference::{Reference, ReferenceError};
use crate::registry::RegistryError;
use crate::store::StoreError;

/// An image can't be had. What it displays is complete: it is what `kubectl describe` shows.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The name can't be one.
    #[error("Failed to apply default image tag \"{}\": {}", .0.name(), .0)]
    Name(ReferenceError),
    /// It isn't here, and may not be pulled.
    #[error("Container image \"{0}\" is not present with pull policy of Never")]
    NeverPull(String),
    /// What is here can't be read.
    #[error("Failed to inspect image \"{reference}\": {}", causes(.cause))]
    Inspect {
        /// The full name.
        reference: String,
        /// Why.
        cause: PullError,
    },
    /// The registry doesn't answer.
    #[error("image pull failed for {reference} because the registry is unavailable: {}", causes(.cause))]
    Unavailable {
        /// The full name.
        reference: String,
        /// Why.
        cause: PullError,
    },
    /// Anything else.
    #[error("failed to pull and unpack image \"{reference}\": {}", causes(.cause))]
    Pull {
        /// The full name.
        reference: String,
        /// Why.
        cause: PullError,
    },
}

/// A step of a pull failed.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Asking the registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Reading what it answered.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// Keeping it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Unpacking it.
    #[error(transparent)]
    Layer(#[from] LayerError),
}

impl ImageError {
    /// The reason of the container's waiting state.
    pub fn reason(&self) -> &'static str {
        match self {
            ImageError::Name(_) => "InvalidImageName",
            ImageError::NeverPull(_) => "ErrImageNeverPull",
            ImageError::Inspect { .. } => "ImageInspectError",
            ImageError::Unavailable { .. } => "RegistryUnavailable",
            ImageError::Pull { .. } => "ErrImagePull",
        }
    }

    pub(crate) fn pulling(reference: &Reference, cause: impl Into<PullError>) -> ImageError {
        let (reference, cause) = (reference.to_string(), cause.into());
        match &cause {
            PullError::Registry(error) if error.is_unavailable() => {
                ImageError::Unavailable { reference, cause }
            }
            _ => ImageError::Pull { reference, cause },
        }
    }

    pub(crate) fn inspecting(reference: &Reference, cause: impl Into<PullError>) -> ImageError {
        ImageError::Inspect {
            reference: reference.to_string(),
            cause: cause.into(),
        }
    }

    /// The store's own failure, if that is the cause.
    pub fn store(&self) -> Option<&StoreError> {
        let (ImageError::Inspect { cause, .. }
        | ImageError::Unavailable { cause, .. }
        | ImageError::Pull { cause, .. }) = self
        else {
            return None;
        };
        match cause {
            PullError::Store(error) | PullError::Registry(RegistryError::Store(error)) => {
                Some(error)
            }
            _ => None,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        let own = match self {
            ImageError::Unavailable {
                cause: PullError::Registry(error),
                ..
            }
            | ImageError::Pull {
                cause: PullError::Registry(error),
                ..
            } => error.hint(),
            _ => None,
        };
        match self {
            ImageError::Unavailable { .. } => own.or(Some(
                "is this host allowed to reach the registry? Set https_proxy, name a mirror in \
                 ~/.config/coracle/registries.toml, or bring the image here with `coracle image load`",
            )),
            _ => own,
        }
    }
}

/// An error with its causes, in one line.
pub fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        // Some errors say what their cause says.
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        next = cause.source();
    }
    text
}
