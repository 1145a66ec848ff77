//! Errors of downloads.

use std::error::Error;

use crate::archive::ArchiveError;
use crate::store::ReleaseStoreError;
use crate::version::{PINNED_KUBERNETES, VersionError};

/// A release cannot be downloaded; nothing was installed.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Invalid `--version` or `--etcd-version`.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// Invalid `--mirror`.
    #[error("{url:?} cannot be a mirror: {reason}")]
    Mirror {
        /// As given by the user.
        url: String,
        /// The problem.
        reason: String,
    },
    /// There are no official binaries for this machine.
    #[error("there are no official releases of Kubernetes for {0}")]
    Architecture(&'static str),
    /// The TLS client cannot be set up.
    #[error("cannot set up TLS")]
    Client(#[source] reqwest::Error),
    /// The server does not have the version.
    #[error(
        "no such version {version} of {product} at {url}; versions look like {PINNED_KUBERNETES}"
    )]
    NoSuchVersion {
        /// Kubernetes or etcd.
        product: &'static str,
        /// The requested version.
        version: String,
        /// The requested URL.
        url: String,
    },
    /// The server answered with another error status.
    #[error("{url} answered {status}")]
    Status {
        /// The requested URL.
        url: String,
        /// The status.
        status: reqwest::StatusCode,
    },
    /// All attempts to connect failed.
    #[error("cannot connect to {url}, tried {tries} times")]
    Unreachable {
        /// The requested URL.
        url: String,
        /// The number of attempts.
        tries: u32,
        /// The last error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection broke in every attempt.
    #[error("the download of {url} was interrupted {tries} times")]
    Interrupted {
        /// The requested URL.
        url: String,
        /// The number of attempts.
        tries: u32,
        /// The last error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The list of checksums does not contain the file's.
    #[error("{url} has no SHA-256 checksum for {file}")]
    NoChecksum {
        /// The URL of the list.
        url: String,
        /// The file.
        file: String,
    },
    /// The downloaded file has another checksum.
    #[error(
        "the checksum of {file} from {url} is wrong: expected {expected}, got {got}; the file was deleted"
    )]
    Checksum {
        /// Its name.
        file: String,
        /// Its URL.
        url: String,
        /// Hexadecimal SHA-256, as published.
        expected: String,
        /// Hexadecimal SHA-256 of the download.
        got: String,
    },
    /// The file exceeds the size limit.
    #[error("{url} is too large to be a part of Kubernetes")]
    TooLarge {
        /// The requested URL.
        url: String,
    },
    /// etcd's archive has unexpected contents.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The release cannot be stored.
    #[error(transparent)]
    Store(#[from] ReleaseStoreError),
}

impl FetchError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Version(error) => return error.hint(),
            Self::Store(error) | Self::Archive(ArchiveError::Store(error)) => return error.hint(),
            Self::Mirror { .. } => {
                "a mirror has MIRROR/release/VERSION/bin/linux/ARCH/… as https://dl.k8s.io, and MIRROR/etcd/VERSION/…"
            }
            Self::Architecture(_) => {
                "build it from source with `kubernetes/build DIR`, then `coracle kubernetes import DIR`"
            }
            Self::Client(_) => {
                "if this host has no CA certificates, name a file of them: SSL_CERT_FILE=…"
            }
            Self::NoSuchVersion { .. } => {
                "https://kubernetes.io/releases lists the versions of Kubernetes, and \
                 https://github.com/etcd-io/etcd/releases those of etcd; a mirror may not have them all"
            }
            Self::Status { .. } => {
                "a proxy may be in the way (https_proxy, no_proxy), or the server fails: try again later"
            }
            Self::Unreachable { .. } => {
                "is this host allowed to reach the internet? Try a login node, set https_proxy, name a nearer \
                 copy with `--mirror URL`, or bring the programs here and `coracle kubernetes import DIR`"
            }
            Self::Interrupted { .. } => "run the same command again: it resumes where it stopped",
            Self::NoChecksum { .. }
            | Self::Checksum { .. }
            | Self::TooLarge { .. }
            | Self::Archive(_) => {
                "nothing was installed; run it again, and if that does not help, the mirror or a proxy changes \
                 files: try another with `--mirror URL`"
            }
        };
        Some(text.to_owned())
    }
}
