//! What can go wrong with a download.

use std::error::Error;

use crate::archive::ArchiveError;
use crate::store::StoreError;
use crate::version::{PINNED_KUBERNETES, VersionError};

/// A release can't be downloaded. Nothing has been installed then.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// `--version` or `--etcd-version`.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// `--mirror`.
    #[error("{url:?} can't be a mirror: {reason}")]
    Mirror {
        /// As given.
        url: String,
        /// Why not.
        reason: String,
    },
    /// There are no official binaries for this machine.
    #[error("there are no official releases of Kubernetes for {0}")]
    Architecture(&'static str),
    /// TLS can't be used at all.
    #[error("can't make secure connections")]
    Client(#[source] reqwest::Error),
    /// The server doesn't know the version.
    #[error(
        "no such version {version} of {product} at {url}; versions look like {PINNED_KUBERNETES}"
    )]
    NoSuchVersion {
        /// Kubernetes or etcd.
        product: &'static str,
        /// What was asked for.
        version: String,
        /// Where.
        url: String,
    },
    /// The server answered with something else.
    #[error("{url} answered {status}")]
    Status {
        /// What was asked for.
        url: String,
        /// The answer.
        status: reqwest::StatusCode,
    },
    /// No connection could be made, several times.
    #[error("can't connect to {url}, tried {tries} times")]
    Unreachable {
        /// What was asked for.
        url: String,
        /// How often.
        tries: u32,
        /// The last failure.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection broke, several times.
    #[error("downloading {url} broke off {tries} times")]
    Broken {
        /// What was asked for.
        url: String,
        /// How often.
        tries: u32,
        /// The last failure.
        source: Box<dyn Error + Send + Sync>,
    },
    /// What should hold a checksum holds something else.
    #[error("{url} holds no SHA-256 checksum for {file}")]
    NoChecksum {
        /// The list of checksums.
        url: String,
        /// What it should have told.
        file: String,
    },
    /// The file isn't the one that was released.
    #[error(
        "the checksum of {file} from {url} is wrong: expected {expected}, got {got}; the file was deleted"
    )]
    Checksum {
        /// Its name.
        file: String,
        /// Where it came from.
        url: String,
        /// Hexadecimal SHA-256, as published.
        expected: String,
        /// Hexadecimal SHA-256 of what came.
        got: String,
    },
    /// The server sends more than any release holds.
    #[error("{url} is too large to be a part of Kubernetes")]
    TooLarge {
        /// What was asked for.
        url: String,
    },
    /// The archive of etcd is strange.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// It can't be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl FetchError {
    /// What the user can do about it.
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
                "a proxy may be in the way (https_proxy, no_proxy), or the server is in trouble: try again later"
            }
            Self::Unreachable { .. } => {
                "is this host allowed to reach the internet? Try a login node, set https_proxy, name a nearer \
                 copy with `--mirror URL`, or bring the programs here and `coracle kubernetes import DIR`"
            }
            Self::Broken { .. } => "run the same command again: it resumes where it stopped",
            Self::NoChecksum { .. }
            | Self::Checksum { .. }
            | Self::TooLarge { .. }
            | Self::Archive(_) => {
                "nothing was installed; run it again, and if that doesn't help, the mirror or a proxy changes \
                 files: try another with `--mirror URL`"
            }
        };
        Some(text.to_owned())
    }
}
