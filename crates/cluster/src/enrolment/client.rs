//! The agent's side of enrolment.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use control_plane::pki::new_key;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::identity::NodeIdentity;
use super::protocol::{
    AgentMessage, COMPATIBLE_VERSION, JoinConfig, JoinRequest, LEADER_NAME, LeaderMessage,
    MessageStream, enable_keepalive,
};

/// Time that the leader has to answer.
const ENROLMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The connection of an enrolled agent to the leader.
pub type LeaderConnection = MessageStream<TlsStream<TcpStream>>;

/// The result of enrolment.
pub struct Enrolled {
    /// The connection to the leader.
    pub connection: LeaderConnection,
    /// The node's keys, certificates and settings.
    pub identity: NodeIdentity,
    /// The addresses of this host; the first is the one that reaches the leader.
    pub addresses: Vec<IpAddr>,
}

/// Another agent of this node is enrolled.
#[derive(Debug, thiserror::Error)]
#[error("another agent of this node is enrolled")]
pub struct NodeTaken;

/// The leader refuses this agent.
#[derive(Debug, thiserror::Error)]
#[error("the leader refuses: {0}")]
pub struct EnrolmentRefused(String);

/// Enrols at the leader: with the token the first time, with the certificate of `saved` later.
pub async fn enrol(
    join_config: &JoinConfig,
    node: &str,
    saved: Option<NodeIdentity>,
) -> anyhow::Result<Enrolled> {
    tokio::time::timeout(
        ENROLMENT_TIMEOUT,
        enrol_without_timeout(join_config, node, saved),
    )
    .await
    .context("the leader does not answer")?
}

async fn enrol_without_timeout(
    join_config: &JoinConfig,
    node: &str,
    saved: Option<NodeIdentity>,
) -> anyhow::Result<Enrolled> {
    let (client_key_pem, server_key_pem) = match &saved {
        Some(saved) => (saved.client_key_pem.clone(), saved.server_key_pem.clone()),
        None => (
            new_key(node)?.serialize_pem(),
            new_key(node)?.serialize_pem(),
        ),
    };
    let connector = TlsConnector::from(Arc::new(tls_config(join_config, saved.as_ref())?));
    let mut leader_addresses = join_config.leader_addresses.clone();
    if let Some(saved) = &saved {
        // Another address may belong to this host too (a bridge that every host has): a refused connection there does
        // not show that the leader is gone.
        leader_addresses.retain(|leader| leader.ip() == saved.leader);
    }
    let stream = connect_to_first(&leader_addresses, &connector).await?;
    let (leader, local) = (
        stream.get_ref().0.peer_addr()?.ip(),
        stream.get_ref().0.local_addr()?.ip(),
    );
    let mut addresses = vec![local];
    addresses.extend(
        linux::address::host_addresses()?
            .into_iter()
            .filter(|a| *a != local),
    );

    let mut connection = MessageStream::new(stream);
    let request = JoinRequest {
        version: COMPATIBLE_VERSION.to_owned(),
        node: node.to_owned(),
        token: saved.is_none().then(|| join_config.token.clone()),
        client_key_pem: public_key(&client_key_pem)?,
        server_key_pem: public_key(&server_key_pem)?,
        addresses: addresses.clone(),
    };
    connection
        .send(&AgentMessage::Hello(Box::new(request)))
        .await?;
    let response = match connection.receive().await? {
        Some(LeaderMessage::Welcome(response)) => *response,
        Some(LeaderMessage::Refused(reason)) => return Err(EnrolmentRefused(reason).into()),
        Some(LeaderMessage::NodeTaken) => return Err(NodeTaken.into()),
        Some(LeaderMessage::End) | None => bail!("the leader is ending"),
    };
    Ok(Enrolled {
        connection,
        identity: NodeIdentity {
            client_key_pem,
            server_key_pem,
            response,
            leader,
        },
        addresses,
    })
}

/// Whether another attempt may succeed: the leader did not answer, or the connection broke.
pub fn is_retryable(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.is::<io::Error>() || cause.is::<tokio::time::error::Elapsed>())
}

/// Whether enrolment failed because the leader has ended while its host still runs: the host refuses connections to the
/// leader's port, or another program listens there. Time-outs, missing routes, TLS alerts and truncated handshakes do not
/// show that: a leader that starts, stops or is overloaded causes them too.
pub fn is_leader_gone(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| match tls_error(error) {
            Some(tls) => is_other_program(tls),
            None => error.kind() == io::ErrorKind::ConnectionRefused,
        })
}

/// The TLS error that an I/O error wraps. It is no cause in the chain: `io::Error::source` skips it.
fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Whether a TLS handshake failed because the peer is not the leader: it has another certificate, or does not speak TLS.
fn is_other_program(error: &rustls::Error) -> bool {
    use rustls::{CertificateError, Error, InvalidMessage};
    match error {
        // The leader's own certificate too, if the clocks of the hosts have drifted apart.
        Error::InvalidCertificate(
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. },
        ) => false,
        Error::InvalidCertificate(_) => true,
        // The first record has no TLS header.
        Error::InvalidMessage(invalid) => matches!(
            invalid,
            InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion
        ),
        _ => false,
    }
}

/// Connects to all addresses of the leader's host at once. Some may belong to networks that this host does not reach, or that
/// every host has; the leader is the peer that shows its certificate.
async fn connect_to_first(
    leader_addresses: &[SocketAddr],
    connector: &TlsConnector,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let mut attempts: FuturesUnordered<_> = leader_addresses
        .iter()
        .map(|leader| async move {
            let stream = TcpStream::connect(leader).await?;
            enable_keepalive(&stream)?;
            let name = ServerName::try_from(LEADER_NAME)?;
            anyhow::Ok(connector.connect(name, stream).await?)
        })
        .collect();
    let mut last_error = anyhow::anyhow!("the leader has no address");
    while let Some(attempt) = attempts.next().await {
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) => last_error = error,
        }
    }
    Err(last_error.context(format!("cannot reach the leader at {leader_addresses:?}")))
}

fn tls_config(
    join_config: &JoinConfig,
    saved: Option<&NodeIdentity>,
) -> anyhow::Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(
        join_config.ca_pem.as_bytes(),
    )?)?;
    let config = rustls::ClientConfig::builder().with_root_certificates(roots);
    Ok(match saved {
        None => config.with_no_client_auth(),
        Some(saved) => config.with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(
                saved.response.join_cert_pem.as_bytes(),
            )?],
            PrivateKeyDer::from_pem_slice(saved.client_key_pem.as_bytes())?,
        )?,
    })
}

fn public_key(private_pem: &str) -> anyhow::Result<String> {
    Ok(rcgen::KeyPair::from_pem(private_pem)?.public_key_pem())
}

#[cfg(test)]
mod tests {
    use control_plane::pki::{CertificateAuthority, CertificateSubject, CertificateUsage};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    fn authority() -> CertificateAuthority {
        CertificateAuthority::new("test", Duration::from_secs(600)).unwrap()
    }

    /// A TLS server with a certificate of `authority`.
    fn server(
        authority: &CertificateAuthority,
        name: &str,
        usage: CertificateUsage,
    ) -> TlsAcceptor {
        let subject = CertificateSubject::server(name, vec![name.to_owned()]);
        let identity = authority.issue(&subject, usage).unwrap();
        let certificate = CertificateDer::from_pem_slice(identity.cert_pem.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes());
        let config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.unwrap()], key.unwrap());
        TlsAcceptor::from(Arc::new(config.unwrap()))
    }

    /// Connects as an agent to a program that handles the connection with `peer`.
    async fn connect<F: Future>(
        leader_authority: &CertificateAuthority,
        peer: impl FnOnce(TcpStream) -> F,
    ) -> anyhow::Result<TlsStream<TcpStream>> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ca = CertificateDer::from_pem_slice(leader_authority.cert_pem().as_bytes());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.unwrap()).unwrap();
        let config = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let serve = async {
            let (stream, _) = listener.accept().await.unwrap();
            peer(stream).await;
        };
        let leader_addresses = [address];
        let (connected, ()) = tokio::join!(connect_to_first(&leader_addresses, &connector), serve);
        connected
    }

    /// Answers the client's first message with `bytes` and closes the connection.
    async fn answer(mut stream: TcpStream, bytes: &[u8]) {
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        // Closing with unread data would reset the connection, and the client might not get the bytes.
        while let Ok(1..) = stream.read(&mut buffer).await {}
    }

    #[tokio::test]
    async fn aborted_handshake_does_not_mean_leader_gone() {
        let authority = authority();
        let alert = |level: u8, description: u8| vec![21, 3, 3, 0, 2, level, description];
        for (case, bytes) in [
            ("end of stream", vec![]),
            ("truncated ServerHello", vec![22, 3, 3, 0, 122, 2, 0]),
            ("close_notify", alert(1, 0)),
            ("handshake_failure", alert(2, 40)),
            ("decode_error", alert(2, 50)),
            ("internal_error", alert(2, 80)),
        ] {
            let peer = |stream| async { answer(stream, &bytes).await };
            let error = connect(&authority, peer).await.map(drop).unwrap_err();
            assert!(!is_leader_gone(&error), "{case}: {error:?}");
            assert!(is_retryable(&error), "{case}: {error:?}");
        }
    }

    #[tokio::test]
    async fn other_program_at_port_means_leader_gone() {
        let (own, other) = (authority(), authority());
        for (case, acceptor) in [
            (
                "authority",
                server(&other, LEADER_NAME, CertificateUsage::Server),
            ),
            ("name", server(&own, "node1", CertificateUsage::Server)),
            ("usage", server(&own, LEADER_NAME, CertificateUsage::Client)),
        ] {
            let peer = |stream| async move { drop(acceptor.accept(stream).await) };
            let error = connect(&own, peer).await.map(drop).unwrap_err();
            assert!(is_leader_gone(&error), "another {case}: {error:?}");
        }
        for text in [
            "SSH-2.0-OpenSSH_9.2\r\n",
            "HTTP/1.1 400 Bad Request\r\n\r\n",
        ] {
            let peer = |stream| async { answer(stream, text.as_bytes()).await };
            let error = connect(&own, peer).await.map(drop).unwrap_err();
            assert!(is_leader_gone(&error), "{text}: {error:?}");
        }
        let acceptor = server(&own, LEADER_NAME, CertificateUsage::Server);
        let leader = |stream| async move { drop(acceptor.accept(stream).await) };
        connect(&own, leader).await.unwrap();
    }

    #[test]
    fn only_refused_connection_means_leader_gone() {
        let failed = |kind: io::ErrorKind| {
            let error = anyhow::Error::from(io::Error::from(kind));
            is_leader_gone(&error.context("cannot reach the leader"))
        };
        assert!(failed(io::ErrorKind::ConnectionRefused));
        for kind in [
            io::ErrorKind::InvalidData,
            io::ErrorKind::TimedOut,
            io::ErrorKind::HostUnreachable,
            io::ErrorKind::NetworkUnreachable,
            io::ErrorKind::ConnectionReset,
            io::ErrorKind::UnexpectedEof,
        ] {
            assert!(!failed(kind), "{kind}");
        }
    }
}
