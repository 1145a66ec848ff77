//! The transports of the connection: a Unix socket on one machine, mutual TLS over TCP between machines.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Time-out of connection and TLS handshake with one address of a kubelet. The host may have others, which this one can reach.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection over either transport.
pub type TransportStream = Box<dyn AsyncStream>;

/// A stream of bytes in both directions.
pub trait AsyncStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> AsyncStream for T {}

/// A certificate, its private key, and the CA of the other end, all as PEM. No `Debug`: the key must never reach a log.
#[derive(Clone, Serialize, Deserialize)]
pub struct TransportIdentity {
    /// The CA that has signed the certificate of the other end.
    pub ca_pem: String,
    /// The certificate.
    pub cert_pem: String,
    /// Its private key.
    pub key_pem: String,
}

/// Where a sandbox reaches its kubelet.
#[derive(Clone, Serialize, Deserialize)]
pub enum KubeletEndpoint {
    /// A socket of the same machine, in a directory that only its user can enter.
    Unix(PathBuf),
    /// A port of another machine.
    Tls {
        /// The kubelet's addresses, in the order in which to try them.
        addresses: Vec<SocketAddr>,
        /// The name in the kubelet's certificate.
        server_name: String,
        /// The sandbox's certificate.
        identity: TransportIdentity,
    },
}

impl KubeletEndpoint {
    pub(super) async fn connect(&self) -> io::Result<TransportStream> {
        match self {
            Self::Unix(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Self::Tls {
                addresses,
                server_name,
                identity,
            } => {
                let connector = TlsConnector::from(Arc::new(identity.client_config()?));
                let name = ServerName::try_from(server_name.clone()).map_err(io::Error::other)?;
                let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
                for address in addresses {
                    let connecting = connect_tls(&connector, name.clone(), *address);
                    match tokio::time::timeout(ADDRESS_TIMEOUT, connecting).await {
                        Ok(Ok(stream)) => return Ok(stream),
                        Ok(Err(error)) => failure = error,
                        Err(elapsed) => failure = elapsed.into(),
                    }
                }
                Err(failure)
            }
        }
    }
}

async fn connect_tls(
    connector: &TlsConnector,
    name: ServerName<'static>,
    address: SocketAddr,
) -> io::Result<TransportStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(Box::new(connector.connect(name, stream).await?))
}

/// Accepts connections of sandboxes over one of the transports.
pub enum TransportListener {
    /// A socket of this machine.
    Unix(UnixListener),
    /// A port that demands a certificate of the sandboxes' CA.
    Tls(TcpListener, TlsAcceptor),
}

/// A connection whose TLS handshake, if it needs one, is still to be done.
pub enum PendingStream {
    /// From a socket of this machine.
    Unix(UnixStream),
    /// From another machine.
    Tls(TcpStream, TlsAcceptor),
}

impl TransportListener {
    /// Binds a socket, and replaces that of an earlier kubelet.
    pub fn bind_unix(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(path).map(Self::Unix)
    }

    /// Serves TLS on a port.
    pub fn tls(listener: TcpListener, identity: &TransportIdentity) -> io::Result<Self> {
        let acceptor = TlsAcceptor::from(Arc::new(identity.server_config()?));
        Ok(Self::Tls(listener, acceptor))
    }

    /// Accepts the next connection.
    pub async fn accept(&self) -> io::Result<PendingStream> {
        match self {
            Self::Unix(listener) => Ok(PendingStream::Unix(listener.accept().await?.0)),
            Self::Tls(listener, acceptor) => {
                let (stream, _) = listener.accept().await?;
                Ok(PendingStream::Tls(stream, acceptor.clone()))
            }
        }
    }
}

impl PendingStream {
    /// Completes the handshake.
    pub async fn establish(self) -> io::Result<TransportStream> {
        match self {
            Self::Unix(stream) => Ok(Box::new(stream)),
            Self::Tls(stream, acceptor) => {
                stream.set_nodelay(true)?;
                Ok(Box::new(acceptor.accept(stream).await?))
            }
        }
    }
}

impl TransportIdentity {
    fn client_config(&self) -> io::Result<ClientConfig> {
        let (chain, key) = self.certificate()?;
        ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(chain, key)
            .map_err(io::Error::other)
    }

    fn server_config(&self) -> io::Result<ServerConfig> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let roots = Arc::new(self.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(io::Error::other)?;
        let (chain, key) = self.certificate()?;
        ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(io::Error::other)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(io::Error::other)
    }

    fn roots(&self) -> io::Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(self.ca_pem.as_bytes()) {
            let ca = ca.map_err(io::Error::other)?;
            roots.add(ca).map_err(io::Error::other)?;
        }
        Ok(roots)
    }

    fn certificate(&self) -> io::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let chain: Result<_, _> =
            CertificateDer::pem_slice_iter(self.cert_pem.as_bytes()).collect();
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes());
        Ok((
            chain.map_err(io::Error::other)?,
            key.map_err(io::Error::other)?,
        ))
    }
}
