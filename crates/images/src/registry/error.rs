//! Errors of registries.

use std::error::Error;

use reqwest::StatusCode;

use crate::store::ImageStoreError;
use download::Digest;
use download::error_chain;

/// A request to a registry failed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The TLS client cannot be set up.
    #[error("cannot set up TLS")]
    Client(#[source] reqwest::Error),
    /// A file of CA certificates cannot be used.
    #[error("cannot use the CA certificates in {file}")]
    CaFile {
        /// The configured path.
        file: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Connecting failed.
    #[error("cannot connect to {host}")]
    Unreachable {
        /// The registry.
        host: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection was lost in every attempt.
    #[error("lost the connection to {host} {tries} times")]
    ConnectionLost {
        /// The registry.
        host: String,
        /// The number of attempts.
        tries: u32,
        /// The last error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The registry has no such image or blob.
    #[error("{subject}: not found")]
    NotFound {
        /// The image or blob.
        subject: String,
    },
    /// The registry denied access.
    #[error(
        "{subject}: pull access denied, repository does not exist or may require authorization{}{}",
        after_colon(.message),
        credentials_not_tried(.missing)
    )]
    Denied {
        /// The image.
        subject: String,
        /// The registry's error message.
        message: String,
        /// Why the user's own credentials were not tried.
        missing: Option<String>,
    },
    /// The registry responded with another status.
    #[error("{subject}: {host} answered {status}{}", after_colon(.message))]
    Status {
        /// The image.
        subject: String,
        /// The host that answered.
        host: String,
        /// The status.
        status: StatusCode,
        /// The registry's error message.
        message: String,
    },
    /// The registry's response violates the protocol.
    #[error("{subject}: {host} {detail}")]
    InvalidResponse {
        /// The image.
        subject: String,
        /// The host that answered.
        host: String,
        /// The violation, as a predicate of the host: `sent another range`.
        detail: String,
    },
    /// The response has another digest than requested.
    #[error("{host} sent {got} instead of {expected}")]
    DigestMismatch {
        /// The host that answered.
        host: String,
        /// The requested digest.
        expected: Digest,
        /// The digest of the response.
        got: Digest,
    },
    /// Writing to the store failed.
    #[error(transparent)]
    Store(#[from] ImageStoreError),
    /// There is no endpoint to pull from.
    #[error("no registry to pull from")]
    NoSource,
}

/// Matches the error text, because the TLS library's errors have no codes.
fn tls_hint(error: &str) -> Option<&'static str> {
    if error.contains("InvalidContentType") {
        return Some(
            "if this registry has no TLS, set `insecure = true` for it in \
             ~/.config/coracle/registries.toml (docs/images.md)",
        );
    }
    error.contains("certificate").then_some(
        "if this registry has a certificate of a private CA, set `ca = \"FILE\"` for it in \
         ~/.config/coracle/registries.toml (docs/images.md)",
    )
}

fn after_colon(message: &str) -> String {
    match message {
        "" => String::new(),
        message => format!(": {message}"),
    }
}

fn credentials_not_tried(missing: &Option<String>) -> String {
    match missing {
        None => String::new(),
        Some(reason) => format!("; your own credentials were not tried: {reason}"),
    }
}

impl RegistryError {
    /// Whether the registry cannot be reached or has an internal error, as opposed to rejecting the request.
    pub fn is_unavailable(&self) -> bool {
        match self {
            RegistryError::Unreachable { .. } | RegistryError::ConnectionLost { .. } => true,
            RegistryError::Status { status, .. } => status.is_server_error(),
            _ => false,
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            RegistryError::Client(_) => {
                Some("if this host has no CA certificates, set SSL_CERT_FILE to a file of them")
            }
            RegistryError::Denied { .. } => Some(
                "check the name; if the repository is private, credentials are read from \
                 ~/.docker/config.json (`docker login`, `podman login --authfile ~/.docker/config.json`)",
            ),
            RegistryError::Unreachable { source, .. }
            | RegistryError::ConnectionLost { source, .. } => {
                tls_hint(&error_chain(source.as_ref()))
            }
            _ => None,
        }
    }
}
