//! Waits for the API server without polling it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;

/// Between attempts to connect while nothing listens at all.
const RETRY: Duration = Duration::from_millis(10);

/// Returns when the API server on this host's `port` completes a TLS handshake.
///
/// It binds its port early and accepts late: a connection made in between waits in the kernel's
/// queue, and is answered the moment that the server is there.
pub(crate) async fn wait_until_it_answers(port: u16, ca_pem: &str) -> io::Result<()> {
    let mut roots = rustls::RootCertStore::empty();
    let ca = CertificateDer::from_pem_slice(ca_pem.as_bytes()).map_err(io::Error::other)?;
    roots.add(ca).map_err(io::Error::other)?;
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(config));
    loop {
        let Ok(stream) = TcpStream::connect(("127.0.0.1", port)).await else {
            sleep(RETRY).await;
            continue;
        };
        let name = ServerName::from(std::net::IpAddr::from([127, 0, 0, 1]));
        match connector.connect(name, stream).await {
            Ok(_) => return Ok(()),
            // The server restarted in between.
            Err(_) => sleep(RETRY).await,
        }
    }
}
