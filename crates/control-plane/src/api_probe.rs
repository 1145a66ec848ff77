//! Probes the API server until it responds.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use crate::protocol::{ClusterConfig, ControlPlaneComponent};

/// Timeout of one request. A server that takes longer has died, and will not respond.
const PROBE_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between requests.
const PROBE_INTERVAL: Duration = Duration::from_millis(10);

/// A client of the API server on this host, with the certificate of a component.
pub(crate) struct ApiProbe {
    port: u16,
    connector: TlsConnector,
}

impl ApiProbe {
    /// A probe with the certificate of `component`.
    pub(crate) fn new(
        config: &ClusterConfig,
        component: ControlPlaneComponent,
    ) -> io::Result<Self> {
        let file = |name: String| {
            config
                .files
                .get(&name)
                .map_or(&b""[..], |text| text.as_bytes())
        };
        let certificate =
            |name| CertificateDer::from_pem_slice(file(name)).map_err(io::Error::other);
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(certificate("cluster-ca.crt".to_owned())?)
            .map_err(io::Error::other)?;
        let key = PrivateKeyDer::from_pem_slice(file(format!("{component}.key")));
        let tls = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(
                vec![certificate(format!("{component}.crt"))?],
                key.map_err(io::Error::other)?,
            )
            .map_err(io::Error::other)?;
        Ok(Self {
            port: config.api_port,
            connector: TlsConnector::from(Arc::new(tls)),
        })
    }

    /// Returns when a GET of `path` is answered with 200.
    ///
    /// The server binds its port long before it accepts connections. A connection that is made in between waits in the kernel's
    /// queue, and gets its response as soon as the server accepts it.
    pub(crate) async fn until_ok(&self, path: &str) {
        while !matches!(
            timeout(PROBE_REQUEST_TIMEOUT, self.is_ok(path)).await,
            Ok(Ok(true))
        ) {
            sleep(PROBE_INTERVAL).await;
        }
    }

    async fn is_ok(&self, path: &str) -> io::Result<bool> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        let name = ServerName::from(std::net::IpAddr::from([127, 0, 0, 1]));
        let mut stream = self.connector.connect(name, stream).await?;
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut status = [0; 12];
        stream.read_exact(&mut status).await?;
        Ok(&status == b"HTTP/1.1 200")
    }
}
