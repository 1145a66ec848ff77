//! What can keep the kubelet's API from being served, and how callers are told of errors.

use std::error::Error;
use std::io;

/// Why the kubelet's API could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// A part of the server's identity is not the PEM it should be.
    #[error("the kubelet API's {what} is not usable PEM")]
    Pem {
        /// Which part: certificate chain, private key or client CA.
        what: &'static str,
        /// What the parser said.
        #[source]
        source: rustls_pki_types::pem::Error,
    },
    /// A part of the server's identity holds no certificate at all.
    #[error("the kubelet API's {what} holds no certificate")]
    Empty {
        /// Which part: certificate chain or client CA.
        what: &'static str,
    },
    /// The client CA can't be used to verify clients.
    #[error("the kubelet API's client CA can't verify clients")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
    /// The certificate and key do not make a TLS server.
    #[error("the kubelet API's certificate and key do not make a TLS server")]
    Tls(#[from] rustls::Error),
    /// The listening socket can't tell its own address, so it is no listening socket.
    #[error("the kubelet API's listening socket is not usable")]
    Listener(#[source] io::Error),
}

/// An error with its causes, in one line.
pub(crate) fn causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
