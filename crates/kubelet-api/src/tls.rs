//! The TLS configuration of the server.

use std::sync::Arc;

use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::ApiError;

/// Certificates and key of the server. No `Debug`: the key must never reach a log.
#[derive(Clone)]
pub struct ServerIdentity {
    /// The serving certificate and its intermediates, PEM.
    pub cert_chain_pem: String,
    /// The private key of the serving certificate, PEM.
    pub key_pem: String,
    /// The CAs of client certificates, PEM.
    pub client_ca_pem: String,
}

impl ServerIdentity {
    /// Builds the configuration. The handshake fails for clients with a certificate of another CA, and for clients without a
    /// certificate unless the server accepts tokens.
    pub(crate) fn tls_config(&self, accepts_tokens: bool) -> Result<ServerConfig, ApiError> {
        // Name the provider: the process may not have installed a default one.
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
        // Exec, attach and port-forward need HTTP/1.1 for their upgrade. Go's client uses HTTP/2 for the rest.
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
