//! The accept loop: HTTPS for the API server's aggregator only.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use client_auth::{UnauthenticatedConnections, UnauthenticatedSlot, certificate_common_name};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::cluster_source::Kubelets;
use crate::handlers::router;
use crate::usage_cache::UsageCache;

/// Time limit for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit for connections whose client has not authenticated.
const MAX_UNAUTHENTICATED_METRICS_CLIENTS: usize = 512;
/// Delay after a failed accept, which mostly means that file descriptors ran out.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum MetricsServeError {
    /// A part of the identity is not valid PEM.
    #[error("cannot parse the {what} of the metrics API as PEM")]
    Pem {
        /// The part.
        what: &'static str,
        /// The parser's error.
        #[source]
        source: rustls_pki_types::pem::Error,
    },
    /// The client CA cannot be used.
    #[error("cannot verify clients of the metrics API with its client CA")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
    /// Certificate and key cannot be used.
    #[error("cannot use the certificate and key of the metrics API for TLS")]
    Tls(#[from] rustls::Error),
}

/// The server's certificate and the client that it admits. No `Debug`: the key must never reach a log.
#[derive(Clone)]
pub struct MetricsServerIdentity {
    /// The serving certificate, PEM.
    pub cert_pem: String,
    /// The private key, PEM.
    pub key_pem: String,
    /// The CA of the aggregator's client certificate, PEM.
    pub client_ca_pem: String,
    /// The common name of that certificate.
    pub client_name: String,
}

/// Serves until the future is dropped.
pub async fn serve(
    listener: TcpListener,
    identity: MetricsServerIdentity,
    kubelets: Kubelets,
) -> Result<(), MetricsServeError> {
    let router = router(Arc::new(UsageCache::new(kubelets)));
    let unauthenticated = UnauthenticatedConnections::new(MAX_UNAUTHENTICATED_METRICS_CLIENTS);
    serve_router(
        listener,
        identity,
        router,
        unauthenticated,
        HANDSHAKE_TIMEOUT,
    )
    .await
}

async fn serve_router(
    listener: TcpListener,
    identity: MetricsServerIdentity,
    router: Router,
    unauthenticated: Arc<UnauthenticatedConnections>,
    handshake_timeout: Duration,
) -> Result<(), MetricsServeError> {
    let acceptor = TlsAcceptor::from(Arc::new(identity.tls()?));
    let client_name: Arc<str> = identity.client_name.as_str().into();
    drop(identity);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the metrics API");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                continue;
            }
        };
        let (acceptor, router) = (acceptor.clone(), router.clone());
        let client_name = Arc::clone(&client_name);
        let slot = unauthenticated.admit();
        tokio::spawn(async move {
            let handshake = tokio::select! {
                handshake = tokio::time::timeout(handshake_timeout, acceptor.accept(stream)) => handshake,
                () = slot.evicted() => {
                    tracing::debug!("evicted an unauthenticated connection");
                    return;
                }
            };
            match handshake {
                Ok(Ok(stream)) => serve_connection(stream, router, &client_name, slot).await,
                // Debug level: any host on the network can cause this.
                Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                Err(_) => tracing::debug!("TLS handshake timed out"),
            }
        });
    }
}

async fn serve_connection(
    stream: tokio_rustls::server::TlsStream<TcpStream>,
    router: Router,
    client_name: &str,
    slot: UnauthenticatedSlot,
) {
    let chain = stream.get_ref().1.peer_certificates();
    let common_name = chain
        .and_then(|chain| chain.first())
        .and_then(certificate_common_name);
    // Check the name too: the CA may sign other clients one day.
    if common_name.is_none_or(|name| name != client_name) {
        tracing::warn!("rejected a client of the metrics API: unexpected certificate name");
        return;
    }
    drop(slot);
    let server = auto::Builder::new(TokioExecutor::new());
    let service = TowerToHyperService::new(router);
    let served = server.serve_connection(TokioIo::new(stream), service).await;
    if let Err(error) = served {
        tracing::debug!(%error, "connection to the metrics API failed");
    }
}

impl MetricsServerIdentity {
    fn tls(&self) -> Result<ServerConfig, MetricsServeError> {
        let pem = |what| move |source| MetricsServeError::Pem { what, source };
        let certificate =
            |what, text: &str| CertificateDer::from_pem_slice(text.as_bytes()).map_err(pem(what));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(certificate("client CA", &self.client_ca_pem)?)?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .map_err(MetricsServeError::ClientCa)?;
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

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose,
        IsCa, KeyPair, KeyUsagePurpose,
    };
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::TlsConnector;

    use super::*;

    const CLIENT: &str = "front-proxy-client";

    /// A certificate signed by `issuer`, and its key, PEM.
    fn issued(
        issuer: &CertifiedIssuer<'_, KeyPair>,
        name: &str,
        usage: ExtendedKeyUsagePurpose,
    ) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    fn authority() -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn client_tls(ca: &str, (certificate, key): &(String, String)) -> TlsConnector {
        let read = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(read(ca)).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![read(certificate)],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap();
        TlsConnector::from(Arc::new(config))
    }

    #[tokio::test]
    async fn idle_connections_do_not_block_the_api_server() {
        let ca = authority();
        let (cert_pem, key_pem) = issued(&ca, "server", ExtendedKeyUsagePurpose::ServerAuth);
        let client = issued(&ca, CLIENT, ExtendedKeyUsagePurpose::ClientAuth);
        let identity = MetricsServerIdentity {
            cert_pem,
            key_pem,
            client_ca_pem: ca.pem(),
            client_name: CLIENT.to_owned(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/healthz", get(|| async { "ok" }));
        let unauthenticated = UnauthenticatedConnections::new(2);
        // So long that only eviction frees slots.
        let hour = Duration::from_secs(3600);
        let serving = serve_router(listener, identity, router, unauthenticated, hour);
        let serving = tokio::spawn(serving);
        let mut idle = Vec::new();
        for _ in 0..4 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let connector = client_tls(&ca.pem(), &client);
        let requests = async {
            let stream = TcpStream::connect(address).await.unwrap();
            let name = "localhost".try_into().unwrap();
            let mut stream = connector.connect(name, stream).await.unwrap();
            // An authenticated connection needs no slot: the second request succeeds after many other connections.
            for _ in 0..2 {
                let request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
                stream.write_all(request).await.unwrap();
                let mut response = [0; 1024];
                let n = stream.read(&mut response).await.unwrap();
                assert!(response[..n].starts_with(b"HTTP/1.1 200"));
                for _ in 0..4 {
                    idle.push(TcpStream::connect(address).await.unwrap());
                }
                // When the server has evicted the oldest, it has accepted the new ones.
                let oldest = idle.len() - 3;
                assert_eq!(idle[oldest].read(&mut [0]).await.unwrap(), 0);
            }
        };
        tokio::time::timeout(Duration::from_secs(60), requests)
            .await
            .unwrap();
        serving.abort();
    }
}
