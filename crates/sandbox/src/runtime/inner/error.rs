//! Errors of the inner process.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Why the inner process could not serve a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InnerError {
    /// For users.
    pub message: String,
    /// Decides the reason in the container's status.
    pub kind: InnerErrorKind,
}

/// The cause of an [`InnerError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InnerErrorKind {
    /// The program is missing or not executable, or the pod's spec is invalid for it.
    Program,
    /// The runtime or the host failed.
    Runtime,
}

impl InnerError {
    /// An error of the program or of the pod's spec.
    pub fn program(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            kind: InnerErrorKind::Program,
        }
    }

    /// An error of the runtime or of the host.
    pub fn runtime(message: impl Display) -> Self {
        Self {
            message: message.to_string(),
            kind: InnerErrorKind::Runtime,
        }
    }
}

/// Turns an error of the runtime or of the host into `cannot ACTION: ERROR`.
pub fn cannot<E: Display>(action: impl Display) -> impl FnOnce(E) -> InnerError {
    move |error| InnerError::runtime(format_args!("cannot {action}: {error}"))
}
