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
#[error("another agent has this node")]
pub struct NodeTaken;

/// The leader refuses this agent.
#[derive(Debug, thiserror::Error)]
#[error("the leader refuses: {0}")]
pub struct EnrolmentRefused(String);

/// Enrols at the leader: with the token the first time, with the certificate of `before` later.
pub async fn enrol(
    join_config: &JoinConfig,
    node: &str,
    before: Option<NodeIdentity>,
) -> anyhow::Result<Enrolled> {
    tokio::time::timeout(
        ENROLMENT_TIMEOUT,
        enrol_without_timeout(join_config, node, before),
    )
    .await
    .context("the leader does not answer")?
}

async fn enrol_without_timeout(
    join_config: &JoinConfig,
    node: &str,
    before: Option<NodeIdentity>,
) -> anyhow::Result<Enrolled> {
    let (client_key_pem, server_key_pem) = match &before {
        Some(before) => (before.client_key_pem.clone(), before.server_key_pem.clone()),
        None => (
            new_key(node)?.serialize_pem(),
            new_key(node)?.serialize_pem(),
        ),
    };
    let connector = TlsConnector::from(Arc::new(tls(join_config, before.as_ref())?));
    let mut leaders = join_config.leaders.clone();
    if let Some(before) = &before {
        // Another address may belong to this host too (a bridge that every host has): a refused connection there says
        // nothing about the leader.
        leaders.retain(|leader| leader.ip() == before.leader);
    }
    let stream = first_to_answer(&leaders, &connector).await?;
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
        token: before.is_none().then(|| join_config.token.clone()),
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

/// Whether enrolment failed because the leader's host is up and the leader is not: its port is closed, or belongs to
/// another program. Time-outs and missing routes don't show that.
pub fn is_leader_gone(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().map(io::Error::kind)
    };
    // A TLS handshake with another program ends with invalid data.
    let gone = [io::ErrorKind::ConnectionRefused, io::ErrorKind::InvalidData];
    error
        .chain()
        .filter_map(kind)
        .any(|kind| gone.contains(&kind))
}

/// Connects to all addresses of the leader's host at once. Some may belong to networks that this host doesn't reach, or that
/// every host has; the leader is the peer that shows its certificate.
async fn first_to_answer(
    leaders: &[SocketAddr],
    connector: &TlsConnector,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let mut attempts: FuturesUnordered<_> = leaders
        .iter()
        .map(|leader| async move {
            let stream = TcpStream::connect(leader).await?;
            enable_keepalive(&stream)?;
            let name = ServerName::try_from(LEADER_NAME)?;
            anyhow::Ok(connector.connect(name, stream).await?)
        })
        .collect();
    let mut problem = anyhow::anyhow!("the leader has no address");
    while let Some(attempt) = attempts.next().await {
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) => problem = error,
        }
    }
    Err(problem.context(format!("cannot reach the leader at {leaders:?}")))
}

fn tls(
    join_config: &JoinConfig,
    before: Option<&NodeIdentity>,
) -> anyhow::Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(
        join_config.ca_pem.as_bytes(),
    )?)?;
    let config = rustls::ClientConfig::builder().with_root_certificates(roots);
    Ok(match before {
        None => config.with_no_client_auth(),
        Some(before) => config.with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(
                before.response.join_cert_pem.as_bytes(),
            )?],
            PrivateKeyDer::from_pem_slice(before.client_key_pem.as_bytes())?,
        )?,
    })
}

fn public_key(private_pem: &str) -> anyhow::Result<String> {
    Ok(rcgen::KeyPair::from_pem(private_pem)?.public_key_pem())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refused_connection_means_leader_gone() {
        let failed = |kind: io::ErrorKind| {
            let error = anyhow::Error::from(io::Error::from(kind));
            is_leader_gone(&error.context("cannot reach the leader"))
        };
        assert!(failed(io::ErrorKind::ConnectionRefused));
        assert!(failed(io::ErrorKind::InvalidData));
        for kind in [
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
