//! The accept loop: HTTPS for the API server's aggregator, and nobody else.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use kubelet_api::{UnauthenticatedConnections, UnauthenticatedSlot};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::answers::router;
use crate::kubelets::Kubelets;
use crate::usage::Usages;

/// How long a client may take to authenticate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// How many connections may be open at once whose client has not authenticated.
const MAX_UNAUTHENTICATED: usize = 512;
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
    let router = router(Arc::new(Usages::new(kubelets)));
    let unauthenticated = UnauthenticatedConnections::new(MAX_UNAUTHENTICATED);
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
    identity: Identity,
    router: Router,
    unauthenticated: Arc<UnauthenticatedConnections>,
    handshake_timeout: Duration,
) -> Result<(), ServeError> {
    let acceptor = TlsAcceptor::from(Arc::new(identity.tls()?));
    let client_name: Arc<str> = identity.client_name.as_str().into();
    drop(identity);
    loop {
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
                Ok(Ok(stream)) => connected(stream, router, &client_name, slot).await,
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
    slot: UnauthenticatedSlot,
) {
    let chain = stream.get_ref().1.peer_certificates();
    let peer = chain
        .and_then(|chain| chain.first())
        .and_then(kubelet_api::certificate_common_name);
    // Being signed is not enough: the authority may sign others one day.
    if peer.is_none_or(|peer| peer != client_name) {
        tracing::warn!("refused a caller of the metrics API");
        return;
    }
    drop(slot);
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

    /// A certificate of `issuer` and its key, PEM.
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
    async fn held_connections_do_not_keep_the_api_server_out() {
        let ca = authority();
        let (cert_pem, key_pem) = issued(&ca, "server", ExtendedKeyUsagePurpose::ServerAuth);
        let client = issued(&ca, CLIENT, ExtendedKeyUsagePurpose::ClientAuth);
        let identity = Identity {
            cert_pem,
            key_pem,
            client_ca_pem: ca.pem(),
            client_name: CLIENT.to_owned(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/healthz", get(|| async { "ok" }));
        let unauthenticated = UnauthenticatedConnections::new(2);
        // Nothing but eviction makes room.
        let hour = Duration::from_secs(3600);
        let serving = serve_router(listener, identity, router, unauthenticated, hour);
        let serving = tokio::spawn(serving);
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(TcpStream::connect(address).await.unwrap());
        }
        let connector = client_tls(&ca.pem(), &client);
        let ask = async {
            let stream = TcpStream::connect(address).await.unwrap();
            let name = "localhost".try_into().unwrap();
            let mut stream = connector.connect(name, stream).await.unwrap();
            // Being connected is no slot: the second request comes when many others have come.
            for _ in 0..2 {
                let request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
                stream.write_all(request).await.unwrap();
                let mut answer = [0; 1024];
                let n = stream.read(&mut answer).await.unwrap();
                assert!(answer[..n].starts_with(b"HTTP/1.1 200"));
                for _ in 0..4 {
                    held.push(TcpStream::connect(address).await.unwrap());
                }
                // As soon as the oldest is closed, the new ones have been accepted.
                let oldest = held.len() - 3;
                assert_eq!(held[oldest].read(&mut [0]).await.unwrap(), 0);
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ask)
            .await
            .unwrap();
        serving.abort();
    }
}
