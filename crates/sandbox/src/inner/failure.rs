//! Why a container could not be started.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Why, in words, and whose fault it is.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    /// For people.
    pub message: String,
    /// The program to run is missing or can't be run, or what the pod asks for it can't be.
    pub program: bool,
}

impl Failure {
    /// The program's, or the pod's.
    pub fn program(message: String) -> Self {
        Self {
            message,
            program: true,
        }
    }
}

/// What was being done when something of ours, or of the host's, went wrong.
pub fn failed<E: Display>(doing: impl Display) -> impl FnOnce(E) -> Failure {
    move |error| Failure {
        message: format!("{doing}: {error}"),
        program: false,
    }
}
