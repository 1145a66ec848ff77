//! Errors of [`serve`](crate::serve), and how errors are formatted for clients.

use std::error::Error;
use std::io;

/// Why the kubelet's API could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// A part of the server's identity is not valid PEM.
    #[error("cannot parse the {what} of the kubelet API as PEM")]
    Pem {
        /// The part: certificate chain, private key or client CA.
        what: &'static str,
        /// The parser's error.
        #[source]
        source: rustls_pki_types::pem::Error,
    },
    /// A part of the server's identity contains no certificate.
    #[error("no certificate in the {what} of the kubelet API")]
    Empty {
        /// The part: certificate chain or client CA.
        what: &'static str,
    },
    /// The client CA cannot be used.
    #[error("cannot verify clients of the kubelet API with its client CA")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
    /// Certificate and key cannot be used.
    #[error("cannot use the certificate and key of the kubelet API for TLS")]
    Tls(#[from] rustls::Error),
    /// The listening socket has no address.
    #[error("cannot read the address of the kubelet API's listener")]
    Listener(#[source] io::Error),
}

/// An error with its sources, in one line.
pub(crate) fn error_chain(error: &dyn Error) -> String {
    let sources = std::iter::successors(error.source(), |&source| source.source());
    sources.fold(error.to_string(), |text, source| {
        format!("{text}: {source}")
    })
}
