//! The server's identity, and mutual TLS made from it.

use std::sync::Arc;

use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::ApiError;

/// The PEM texts that make the kubelet a TLS server; no `Debug`, for the key must never reach a log.
#[derive(Clone)]
pub struct ServerIdentity {
    /// The serving certificate, followed by its intermediates if there are any.
    pub cert_chain_pem: String,
    /// The serving certificate's private key.
    pub key_pem: String,
    /// The CA (or several) that signs the certificates of allowed clients.
    pub client_ca_pem: String,
}

impl ServerIdentity {
    /// A TLS configuration that turns away every client with a certificate that is not of `client_ca_pem`, and every
    /// client with none unless it may show a token instead.
    pub(crate) fn tls_config(&self, accepts_tokens: bool) -> Result<ServerConfig, ApiError> {
        // The provider is named here and not taken from the process, which may not have chosen one yet.
        let provider = Arc::new(aws_lc_rs::default_provider());

        let mut roots = RootCertStore::empty();
        for ca in certificates("client CA", &self.client_ca_pem)? {
            roots.add(ca)?;
        }
        let mut verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        if accepts_tokens {
            verifier = verifier.allow_unauthenticated();
        }
        let verifier = verifier.build().map_err(ApiError::ClientCa)?;

        let chain = certificates("certificate chain", &self.cert_chain_pem)?;
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).map_err(|source| {
            ApiError::Pem {
                what: "private key",
                source,
            }
        })?;

        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        // HTTP/1.1 carries the upgrades of exec and port-forward, HTTP/2 everything else that Go's client asks.
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn certificates(what: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, ApiError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|source| ApiError::Pem { what, source })?;
    if found.is_empty() {
        return Err(ApiError::Empty { what });
    }
    Ok(found)
}
