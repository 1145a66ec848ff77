//! The agent's end of the life line to the leader.

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
use crate::handover::{
    Handover, Hello, LEADER_NAME, ToLeader, ToNode, VERSION, Wire, notice_silence,
};

/// How long the leader may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The life line.
pub type Line = Wire<TlsStream<TcpStream>>;

/// An agent that was admitted.
pub struct Admitted {
    /// The line to the leader.
    pub line: Line,
    /// Who we are.
    pub identity: NodeIdentity,
    /// The addresses of this host; the first is the one that reaches the leader.
    pub addresses: Vec<IpAddr>,
}

/// Another agent has this node.
#[derive(Debug, thiserror::Error)]
#[error("another agent has this node")]
pub struct Replaced;

/// The leader does not admit this agent.
#[derive(Debug, thiserror::Error)]
#[error("the leader refuses: {0}")]
pub struct Refused(String);

/// Reports to the leader: with the token the first time, with the certificate it gave us later.
pub async fn report(
    handover: &Handover,
    node: &str,
    before: Option<NodeIdentity>,
) -> anyhow::Result<Admitted> {
    tokio::time::timeout(PATIENCE, report_patiently(handover, node, before))
        .await
        .context("the leader does not answer")?
}

async fn report_patiently(
    handover: &Handover,
    node: &str,
    before: Option<NodeIdentity>,
) -> anyhow::Result<Admitted> {
    let (client_key_pem, server_key_pem) = match &before {
        Some(before) => (before.client_key_pem.clone(), before.server_key_pem.clone()),
        None => (
            new_key(node)?.serialize_pem(),
            new_key(node)?.serialize_pem(),
        ),
    };
    let connector = TlsConnector::from(Arc::new(tls(handover, before.as_ref())?));
    let mut leaders = handover.leaders.clone();
    if let Some(before) = &before {
        // Others may be addresses of this host too (a bridge that every host has), where a refusal says nothing of the leader.
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

    let mut line = Wire::new(stream);
    let hello = Hello {
        version: VERSION.to_owned(),
        node: node.to_owned(),
        token: before.is_none().then(|| handover.token.clone()),
        client_key_pem: public_key(&client_key_pem)?,
        server_key_pem: public_key(&server_key_pem)?,
        addresses: addresses.clone(),
    };
    line.send(&ToLeader::Hello(Box::new(hello))).await?;
    let welcome = match line.receive().await? {
        Some(ToNode::Welcome(welcome)) => *welcome,
        Some(ToNode::Refused(reason)) => return Err(Refused(reason).into()),
        Some(ToNode::Replaced) => return Err(Replaced.into()),
        Some(ToNode::End) | None => bail!("the leader is ending"),
    };
    Ok(Admitted {
        line,
        identity: NodeIdentity {
            client_key_pem,
            server_key_pem,
            welcome,
            leader,
        },
        addresses,
    })
}

/// Whether an attempt to report may do better next time: there was silence, or the connection broke.
pub fn is_worth_repeating(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.is::<io::Error>() || cause.is::<tokio::time::error::Elapsed>())
}

/// Whether an attempt to report failed because the leader's host lives and the leader doesn't: nobody listens at its port, or
/// another program does. Time-outs and routes that are missing don't say that.
pub fn is_leader_gone(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().map(io::Error::kind)
    };
    // A TLS handshake with a stranger ends with invalid data.
    let gone = [io::ErrorKind::ConnectionRefused, io::ErrorKind::InvalidData];
    error
        .chain()
        .filter_map(kind)
        .any(|kind| gone.contains(&kind))
}

/// Connects to all addresses of the leader's host at once. Some may be of networks that aren't ours, or
/// that every host has: who shows the leader's certificate is it.
async fn first_to_answer(
    leaders: &[SocketAddr],
    connector: &TlsConnector,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let mut attempts: FuturesUnordered<_> = leaders
        .iter()
        .map(|leader| async move {
            let stream = TcpStream::connect(leader).await?;
            notice_silence(&stream)?;
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

fn tls(handover: &Handover, before: Option<&NodeIdentity>) -> anyhow::Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(handover.ca_pem.as_bytes())?)?;
    let config = rustls::ClientConfig::builder().with_root_certificates(roots);
    Ok(match before {
        None => config.with_no_client_auth(),
        Some(before) => config.with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(
                before.welcome.join_cert_pem.as_bytes(),
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
    fn only_a_refusal_means_that_the_leader_is_gone() {
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
