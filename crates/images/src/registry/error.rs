//! What can go wrong with a registry.

use std::error::Error;

use reqwest::StatusCode;

use crate::digest::Digest;
use crate::error::causes;
use crate::store::StoreError;

/// Something can't be had from a registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// TLS can't be used at all.
    #[error("can't make secure connections")]
    Client(#[source] reqwest::Error),
    /// A file of certificates can't be used.
    #[error("can't use the certificates in {file}")]
    Authority {
        /// As configured.
        file: String,
        /// Why not.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No connection could be made.
    #[error("can't connect to {host}")]
    Unreachable {
        /// The registry.
        host: String,
        /// What failed.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection broke, several times.
    #[error("the connection to {host} broke {tries} times")]
    Broken {
        /// The registry.
        host: String,
        /// How often.
        tries: u32,
        /// The last failure.
        source: Box<dyn Error + Send + Sync>,
    },
    /// It has no such image.
    #[error("{what}: not found")]
    NotFound {
        /// The image, or a part of it.
        what: String,
    },
    /// It lets nobody in, or not with these credentials.
    #[error(
        "{what}: pull access denied, repository does not exist or may require authorization{}{}",
        colon(.said),
        also(.missing)
    )]
    Denied {
        /// The image.
        what: String,
        /// The registry's own words.
        said: String,
        /// Why the user's own credentials could not be tried.
        missing: Option<String>,
    },
    /// It answered something else.
    #[error("{what}: {host} answered {status}{}", colon(.said))]
    Status {
        /// The image.
        what: String,
        /// Who answered.
        host: String,
        /// The answer.
        status: StatusCode,
        /// The registry's own words.
        said: String,
    },
    /// It answered something that makes no sense.
    #[error("{what}: {host} {said}")]
    Nonsense {
        /// The image.
        what: String,
        /// Who answered.
        host: String,
        /// In which way.
        said: String,
    },
    /// It sent something else than what was asked for.
    #[error("{host} sent {got} instead of {expected}")]
    Digest {
        /// Who.
        host: String,
        /// What was asked for.
        expected: Digest,
        /// What came.
        got: Digest,
    },
    /// What came can't be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The configuration names no place to pull from.
    #[error("there is no registry to pull from")]
    NoSource,
}

/// By the words of the TLS library, which nothing else tells apart.
fn hint_of_tls(said: &str) -> Option<&'static str> {
    if said.contains("InvalidContentType") {
        return Some(
            "if this registry has no TLS, say `insecure = true` for it in \
             ~/.config/coracle/registries.toml (docs/images.md)",
        );
    }
    said.contains("certificate").then_some(
        "if this registry has a certificate of its own, name its authority with `ca = \"FILE\"` in \
         ~/.config/coracle/registries.toml (docs/images.md)",
    )
}

fn colon(said: &str) -> String {
    match said {
        "" => String::new(),
        said => format!(": {said}"),
    }
}

fn also(missing: &Option<String>) -> String {
    match missing {
        None => String::new(),
        Some(why) => format!("; your own credentials were not tried: {why}"),
    }
}

impl RegistryError {
    /// Whether the registry can't be reached at all, as opposed to having said no.
    pub fn is_unavailable(&self) -> bool {
        match self {
            RegistryError::Unreachable { .. } | RegistryError::Broken { .. } => true,
            RegistryError::Status { status, .. } => status.is_server_error(),
            _ => false,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            RegistryError::Client(_) => {
                Some("if this host has no CA certificates, name a file of them: SSL_CERT_FILE=…")
            }
            RegistryError::Denied { .. } => Some(
                "is the name right? If the repository is private, credentials are taken from \
                 ~/.docker/config.json (`docker login`, `podman login --authfile ~/.docker/config.json`)",
            ),
            RegistryError::Unreachable { source, .. } | RegistryError::Broken { source, .. } => {
                hint_of_tls(&causes(source.as_ref()))
            }
            _ => None,
        }
    }
}
