//! The accept loop: HTTPS for the API server's aggregator, and nobody else.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use crate::answers::router;
use crate::kubelets::Kubelets;
use crate::usage::Usages;

/// How long a client may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// How many strangers may be in their handshake at once.
const MAX_HANDSHAKES: usize = 512;
/// After a failed accept, which is for want of descriptors.
const BREATH: Duration = Duration::from_millis(100);

/// Why the API can't be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A part of the identity is no PEM.
    #[error("the metrics API's {what} is not usable PEM")]
    Pem {
        /// Which part.
        what: &'static str,
        /// What the parser said.
        #[source]
        source: rustls_pki_types::pem::Error,
    },
    /// The authority of clients can't be used.
    #[error("the metrics API's client CA can't verify clients")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
    /// Certificate and key don't make a server.
    #[error("the metrics API's certificate and key do not make a TLS server")]
    Tls(#[from] rustls::Error),
}

/// Who the server is, and whom it lets in; no `Debug`, for the key must never reach a log.
#[derive(Clone)]
pub struct Identity {
    /// Its certificate, PEM.
    pub cert_pem: String,
    /// The key to it, PEM.
    pub key_pem: String,
    /// Signs the certificate with which the API server's aggregator comes, PEM.
    pub client_ca_pem: String,
    /// The name in that certificate.
    pub client_name: String,
}

/// Serves until the task is dropped.
pub async fn serve(
    listener: TcpListener,
    identity: Identity,
    kubelets: Kubelets,
) -> Result<(), ServeError> {
    let acceptor = TlsAcceptor::from(Arc::new(identity.tls()?));
    let client_name: Arc<str> = identity.client_name.as_str().into();
    drop(identity);
    let router = router(Arc::new(Usages::new(kubelets)));
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        // Never closed; if it were, serving without a bound is better than not serving.
        let permit = Arc::clone(&handshakes).acquire_owned().await.ok();
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "the metrics API could not accept a connection");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let (acceptor, router) = (acceptor.clone(), router.clone());
        let client_name = Arc::clone(&client_name);
        tokio::spawn(async move {
            let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await;
            drop(permit);
            match handshake {
                Ok(Ok(stream)) => connected(stream, router, &client_name).await,
                // Anybody on the network can do this to us, so it is no warning.
                Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                Err(_) => tracing::debug!("TLS handshake took too long"),
            }
        });
    }
}

async fn connected(
    stream: tokio_rustls::server::TlsStream<TcpStream>,
    router: Router,
    client_name: &str,
) {
    let chain = stream.get_ref().1.peer_certificates();
    let peer = chain
        .and_then(|chain| chain.first())
        .and_then(kubelet_api::peer_of);
    // Being signed is not enough: the authority may sign others one day.
    if peer.is_none_or(|peer| peer.common_name != client_name) {
        tracing::warn!("refused a caller of the metrics API");
        return;
    }
    let server = auto::Builder::new(TokioExecutor::new());
    let service = TowerToHyperService::new(router);
    let served = server.serve_connection(TokioIo::new(stream), service).await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection to the metrics API ended early");
    }
}

impl Identity {
    fn tls(&self) -> Result<ServerConfig, ServeError> {
        let pem = |what| move |source| ServeError::Pem { what, source };
        let certificate =
            |what, text: &str| CertificateDer::from_pem_slice(text.as_bytes()).map_err(pem(what));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(certificate("client CA", &self.client_ca_pem)?)?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .map_err(ServeError::ClientCa)?;
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(
                vec![certificate("certificate", &self.cert_pem)?],
                key.map_err(pem("private key"))?,
            )?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}
