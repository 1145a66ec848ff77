//! Errors of pulls, with the messages and reasons that Kubernetes uses.

use download::error_chain;

use crate::layers::LayerError;
use crate::manifest::DocumentError;
use crate::reference::{Reference, ReferenceError};
use crate::registry::RegistryError;
use crate::store::ImageStoreError;

/// An image cannot be made available. `Display` includes the causes, as in `kubectl describe`.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The name is not a valid reference.
    #[error("Failed to apply default image tag \"{}\": {}", .0.name(), .0)]
    InvalidName(ReferenceError),
    /// The image is not present, and the pull policy is `Never`.
    #[error("Container image \"{0}\" is not present with pull policy of Never")]
    NeverPull(String),
    /// Reading the store failed.
    #[error("Failed to inspect image \"{reference}\": {}", error_chain(.cause))]
    Inspect {
        /// The full name.
        reference: String,
        /// The cause.
        cause: PullError,
    },
    /// The registry cannot be reached or has an internal error.
    #[error("image pull failed for {reference} because the registry is unavailable: {}", error_chain(.cause))]
    Unavailable {
        /// The full name.
        reference: String,
        /// The cause.
        cause: PullError,
    },
    /// Any other failure.
    #[error("failed to pull and unpack image \"{reference}\": {}", error_chain(.cause))]
    Pull {
        /// The full name.
        reference: String,
        /// The cause.
        cause: PullError,
    },
}

/// The cause of a failed pull.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// An invalid manifest, index or configuration.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// The store.
    #[error(transparent)]
    Store(#[from] ImageStoreError),
    /// Unpacking a layer.
    #[error(transparent)]
    Layer(#[from] LayerError),
}

impl ImageError {
    /// The `reason` for the container's waiting state.
    pub fn reason(&self) -> &'static str {
        match self {
            ImageError::InvalidName(_) => "InvalidImageName",
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

    /// The store's error, if that is the cause.
    pub fn store(&self) -> Option<&ImageStoreError> {
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

    /// Advice for the user.
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
                "can this host reach the registry? Set https_proxy, configure a mirror in \
                 ~/.config/coracle/registries.toml, or load the image with `coracle image load`",
            )),
            _ => own,
        }
    }
}
