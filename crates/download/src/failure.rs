//! Errors of downloads.

use std::error::Error;
use std::io;

use reqwest::StatusCode;

use crate::digest::Digest;

/// A download failed.
#[derive(Debug)]
pub struct DownloadError<E> {
    /// The number of failed attempts in a row.
    pub tries: u32,
    /// The failure of the last attempt.
    pub failure: DownloadFailure<E>,
}

/// The failure of one attempt. `E` is the caller's error of a request.
#[derive(Debug, thiserror::Error)]
pub enum DownloadFailure<E> {
    /// The caller could not send the request.
    #[error(transparent)]
    Request(E),
    /// Connecting failed, or the connection was lost.
    #[error(transparent)]
    Connection(reqwest::Error),
    /// The server answered with an error status.
    #[error("the server answered {0}")]
    Status(StatusCode),
    /// The server sent another range than requested.
    #[error("the server sent another range")]
    AnotherRange,
    /// The server sent fewer bytes than the file has.
    #[error("the server sent too few bytes")]
    TooShort,
    /// The server sent more bytes than the file has or may have.
    #[error("the server sent too many bytes")]
    TooLarge,
    /// The file has this digest instead of the expected one.
    #[error("the file has the digest {0}")]
    WrongDigest(Digest),
    /// The partial file cannot be written.
    #[error("cannot write the file")]
    File {
        /// The bytes still to be written, if known.
        missing: Option<u64>,
        /// The cause.
        source: io::Error,
    },
}

impl<E> DownloadFailure<E> {
    /// A connection error, without its URL, which may contain a password.
    pub fn connection(error: reqwest::Error) -> Self {
        DownloadFailure::Connection(error.without_url())
    }

    /// Whether another attempt may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            DownloadFailure::Connection(_)
            | DownloadFailure::AnotherRange
            | DownloadFailure::TooShort => true,
            DownloadFailure::Status(status) => {
                let retried = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
                status.is_server_error() || retried.contains(status)
            }
            DownloadFailure::Request(_)
            | DownloadFailure::TooLarge
            | DownloadFailure::WrongDigest(_)
            | DownloadFailure::File { .. } => false,
        }
    }
}

impl<E> From<io::Error> for DownloadFailure<E> {
    fn from(source: io::Error) -> Self {
        let missing = None;
        DownloadFailure::File { missing, source }
    }
}

/// An error and its sources, in one line.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        // Some errors already end with the text of their source.
        if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        next = cause.source();
    }
    text
}
