//! The leader's enrolment listener: a TCP port with TLS. A single-use token or a certificate of the cluster
//! admits the cluster's nodes, and no other client.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use client_auth::{UnauthenticatedConnections, UnauthenticatedSlot};
use control_plane::ClusterPki;
use control_plane::pki::{CertificateSubject, CertificateUsage};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::protocol::{
    AgentMessage, COMPATIBLE_VERSION, JoinConfig, JoinRequest, JoinResponse, LEADER_NAME,
    LeaderMessage, MessageStream, enable_keepalive, unix_time,
};
use crate::node_plan::NodePlan;
use crate::token;

/// Limit on connections whose client has not authenticated yet, beside one per node: every user of the host can open some.
const MAX_UNAUTHENTICATED: usize = 512;
/// Time that a client has to authenticate.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(3);

/// A change of a node's membership.
#[derive(Debug)]
pub enum NodeEvent {
    /// Its agent has enrolled.
    Joined,
    /// Its Node is Ready.
    Registered,
    /// Slurm has signalled the agent: the job ends.
    JobEnding,
    /// Its agent cannot continue.
    Failed(String),
    /// Its agent has left in order.
    Left,
    /// The connection broke: agent, host or network failed.
    Lost,
}

/// The part of a [`JoinResponse`] that is the same for all nodes.
pub struct SharedNodeConfig {
    /// The cluster's CAs.
    pub pki: Arc<ClusterPki>,
    /// The API server's port.
    pub api_port: u16,
    /// The version of Kubernetes.
    pub kubernetes_version: String,
    /// The job, and the step whose tasks wait for the leader.
    pub job: (u32, Option<u32>),
    /// The cluster's mark.
    pub mark: String,
    /// The secret from which nodes derive their directories and keys.
    pub secret: String,
    /// The longest grace period of pods when the cluster ends.
    pub pods_grace: Duration,
    /// Launch pods as Slurm steps, unless their annotation chooses otherwise.
    pub pods_as_steps: bool,
}

/// Admits the agents of the cluster's nodes and holds their connections.
pub struct EnrolmentListener {
    shared: SharedNodeConfig,
    /// The nodes that may enrol. Membership may change while the cluster runs.
    nodes: Mutex<HashMap<String, NodePlan>>,
    /// Tokens that have not been used, by node.
    tokens: Mutex<HashMap<String, String>>,
    unauthenticated: Arc<UnauthenticatedConnections>,
    authentication_timeout: Duration,
    /// The cluster is ending: no agent is admitted any more.
    closed: AtomicBool,
    members: Mutex<HashMap<String, Member>>,
    events: mpsc::UnboundedSender<(String, NodeEvent)>,
}

/// A node whose agent is connected.
struct Member {
    /// The agent's public key: the same when it reconnects, and different for every other agent.
    key: String,
    sender: mpsc::UnboundedSender<LeaderMessage>,
}

impl EnrolmentListener {
    /// A listener without nodes, for about `expected_nodes` of them, which reports changes to `events`.
    pub fn new(
        shared: SharedNodeConfig,
        expected_nodes: usize,
        events: mpsc::UnboundedSender<(String, NodeEvent)>,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared,
            nodes: Mutex::default(),
            tokens: Mutex::default(),
            unauthenticated: UnauthenticatedConnections::new(MAX_UNAUTHENTICATED + expected_nodes),
            authentication_timeout: AUTHENTICATION_TIMEOUT,
            closed: AtomicBool::new(false),
            members: Mutex::default(),
            events,
        })
    }

    /// Lets these nodes enrol, from now on.
    pub fn add_nodes(&self, nodes: impl IntoIterator<Item = (String, NodePlan)>) {
        self.nodes.lock().unwrap().extend(nodes);
    }

    /// Ends the agent of a node, and lets it enrol no more.
    pub fn remove_node(&self, node: &str) {
        self.nodes.lock().unwrap().remove(node);
        self.tokens.lock().unwrap().remove(node);
        if let Some(member) = self.members.lock().unwrap().get(node) {
            let _ = member.sender.send(LeaderMessage::End);
        }
    }

    /// The configuration with which the agents of `nodes` enrol. Its token admits each of them once.
    pub fn join_config(
        &self,
        nodes: &[String],
        leader_addresses: Vec<SocketAddr>,
    ) -> anyhow::Result<JoinConfig> {
        let token = token::generate()?;
        let mut tokens = self.tokens.lock().unwrap();
        tokens.extend(nodes.iter().map(|node| (node.clone(), token.clone())));
        Ok(JoinConfig {
            version: COMPATIBLE_VERSION.to_owned(),
            leader_addresses,
            ca_pem: self.shared.pki.join.cert_pem().to_owned(),
            token,
            time: unix_time(),
            secret: self.shared.secret.clone(),
        })
    }

    /// Sends `End` to every agent, and admits no more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for member in self.members.lock().unwrap().values() {
            let _ = member.sender.send(LeaderMessage::End);
        }
    }

    /// The nodes whose agents are connected.
    pub fn members(&self) -> HashSet<String> {
        self.members.lock().unwrap().keys().cloned().collect()
    }

    /// Accepts connections until the task is dropped.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) -> anyhow::Result<()> {
        let acceptor = TlsAcceptor::from(Arc::new(self.tls_config()?));
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an agent's connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let slot = self.unauthenticated.admit();
            let (listener, acceptor) = (self.clone(), acceptor.clone());
            tokio::spawn(async move {
                if let Err(error) = listener.handle(stream, acceptor, slot).await {
                    tracing::debug!(%from, error = format!("{error:#}"), "enrolment refused");
                }
            });
        }
    }

    fn tls_config(&self) -> anyhow::Result<rustls::ServerConfig> {
        let join = &self.shared.pki.join;
        let subject = CertificateSubject::server(LEADER_NAME, vec![LEADER_NAME.to_owned()]);
        let identity = join.issue(&subject, CertificateUsage::Server)?;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(join.cert_pem().as_bytes())?)?;
        // An agent authenticates by its token the first time, by the certificate it was given later.
        let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
            .allow_unauthenticated()
            .build()?;
        Ok(rustls::ServerConfig::builder()
            .with_client_cert_verifier(verifier)
            .with_single_cert(
                vec![CertificateDer::from_pem_slice(
                    identity.cert_pem.as_bytes(),
                )?],
                PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes())?,
            )?)
    }

    /// Authenticates and admits the client, then serves it as a member.
    async fn handle(
        &self,
        stream: TcpStream,
        acceptor: TlsAcceptor,
        slot: UnauthenticatedSlot,
    ) -> anyhow::Result<()> {
        enable_keepalive(&stream)?;
        let first_message = async {
            let stream = acceptor.accept(stream).await?;
            let certificate_node = node_of_certificate(&stream)?;
            let mut stream = MessageStream::new(stream);
            match stream.receive::<AgentMessage>().await? {
                Some(AgentMessage::Hello(request)) => {
                    anyhow::Ok((stream, request, certificate_node))
                }
                _ => bail!("expected Hello as the first message"),
            }
        };
        let (mut stream, request, certificate_node) = tokio::select! {
            received = tokio::time::timeout(self.authentication_timeout, first_message) => received??,
            () = slot.evicted() => bail!("evicted by newer unauthenticated connections"),
        };
        let response = match self.admit(&request, certificate_node.as_deref()) {
            Ok(response) => response,
            Err(reason) => {
                let refused = LeaderMessage::Refused(format!("{reason:#}"));
                tokio::time::timeout(self.authentication_timeout, stream.send(&refused)).await??;
                return Err(reason);
            }
        };
        // The token is used up: from here on, eviction must not interrupt.
        drop(slot);
        if self.is_taken(&request) {
            // Two agents of one node would compete for its pods. The connected agent keeps the node.
            stream.send(&LeaderMessage::NodeTaken).await?;
            bail!("another agent of this node is connected");
        }
        let welcome = LeaderMessage::Welcome(Box::new(response));
        if let Err(error) = stream.send(&welcome).await {
            // The agent doesn't know that it was admitted, and retries with the same token.
            if let Some(token) = request.token {
                self.tokens.lock().unwrap().insert(request.node, token);
            }
            return Err(error);
        }
        self.serve_member(&request, stream).await;
        Ok(())
    }

    /// Whether another agent has the node of `request`.
    fn is_taken(&self, request: &JoinRequest) -> bool {
        let members = self.members.lock().unwrap();
        let current = members.get(&request.node);
        current.is_some_and(|member| member.key != request.client_key_pem)
    }

    /// Checks a request: membership, version, and token or certificate.
    fn admit(
        &self,
        request: &JoinRequest,
        certificate_node: Option<&str>,
    ) -> anyhow::Result<JoinResponse> {
        let node = request.node.as_str();
        let plan = self
            .nodes
            .lock()
            .unwrap()
            .get(node)
            .cloned()
            .context("this node is not part of the cluster")?;
        if self.closed.load(Ordering::Relaxed) {
            bail!("the cluster is ending");
        }
        if request.version != COMPATIBLE_VERSION {
            bail!(
                "the agent runs Coracle {}, the leader {COMPATIBLE_VERSION}",
                request.version
            );
        }
        match (&request.token, certificate_node) {
            (None, Some(name)) if name == node => {}
            (Some(token), None) => {
                let mut tokens = self.tokens.lock().unwrap();
                if !tokens
                    .get(node)
                    .is_some_and(|unused| token::equal(token, unused))
                {
                    bail!("the token is wrong or was used before");
                }
                tokens.remove(node);
            }
            _ => bail!("neither a token nor a certificate of this node"),
        }
        self.sign_certificates(request, &plan)
    }

    fn sign_certificates(
        &self,
        request: &JoinRequest,
        plan: &NodePlan,
    ) -> anyhow::Result<JoinResponse> {
        let pki = &self.shared.pki;
        let user = CertificateSubject::user(
            format!("system:node:{}", request.node),
            Some("system:nodes"),
        );
        let peer = CertificateSubject::user(request.node.as_str(), None);
        let mut names = vec![request.node.clone()];
        names.extend(request.addresses.iter().map(ToString::to_string));
        let server = CertificateSubject::server(format!("system:node:{}", request.node), names);
        Ok(JoinResponse {
            client_cert_pem: pki.client.sign(
                &user,
                CertificateUsage::Client,
                &request.client_key_pem,
            )?,
            join_cert_pem: pki.join.sign(
                &peer,
                CertificateUsage::Client,
                &request.client_key_pem,
            )?,
            server_cert_pem: pki.kubelet.sign(
                &server,
                CertificateUsage::Server,
                &request.server_key_pem,
            )?,
            cluster_ca_pem: pki.cluster.cert_pem().to_owned(),
            kubelet_client_ca_pem: pki.kubelet_client.cert_pem().to_owned(),
            api_port: self.shared.api_port,
            cpus: plan.cpus,
            memory_bytes: plan.memory_bytes,
            extended: plan.extended.clone(),
            labels: plan.labels.clone(),
            kubernetes_version: self.shared.kubernetes_version.clone(),
            job: self.shared.job,
            mark: self.shared.mark.clone(),
            pod_cidr: plan.pod_cidr.clone(),
            pods_grace: self.shared.pods_grace,
            pods_as_steps: self.shared.pods_as_steps,
        })
    }

    /// Carries messages both ways until the agent leaves or its connection breaks.
    async fn serve_member(
        &self,
        request: &JoinRequest,
        mut stream: MessageStream<TlsStream<TcpStream>>,
    ) {
        let node = request.node.as_str();
        let (sender, mut outgoing) = mpsc::unbounded_channel();
        let member = Member {
            key: request.client_key_pem.clone(),
            sender: sender.clone(),
        };
        if let Some(replaced) = self.members.lock().unwrap().insert(node.to_owned(), member) {
            let _ = replaced.sender.send(LeaderMessage::NodeTaken);
        }
        let report = |event| drop(self.events.send((node.to_owned(), event)));
        report(NodeEvent::Joined);
        let last_event = loop {
            tokio::select! {
                Some(message) = outgoing.recv() => {
                    if stream.send(&message).await.is_err() {
                        break NodeEvent::Lost;
                    }
                }
                message = stream.receive() => match message {
                    Ok(Some(AgentMessage::Registered)) => report(NodeEvent::Registered),
                    Ok(Some(AgentMessage::JobEnding)) => report(NodeEvent::JobEnding),
                    Ok(Some(AgentMessage::Failed(problem))) => break NodeEvent::Failed(problem),
                    Ok(Some(AgentMessage::Left)) => break NodeEvent::Left,
                    Ok(Some(AgentMessage::Hello(_))) => {}
                    Ok(None) | Err(_) => break NodeEvent::Lost,
                },
            }
        };
        let mut members = self.members.lock().unwrap();
        // A newer connection of the same agent may have replaced this one.
        if members
            .get(node)
            .is_some_and(|current| current.sender.same_channel(&sender))
        {
            members.remove(node);
            report(last_event);
        }
    }
}

/// The node that the client's certificate names.
fn node_of_certificate(stream: &TlsStream<TcpStream>) -> anyhow::Result<Option<String>> {
    let (_, connection) = stream.get_ref();
    let Some([certificate, ..]) = connection.peer_certificates() else {
        return Ok(None);
    };
    let name = client_auth::certificate_common_name(certificate);
    Ok(Some(name.context("the certificate has no common name")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_plane::pki::new_key;

    fn listener() -> Arc<EnrolmentListener> {
        let shared = SharedNodeConfig {
            pki: Arc::new(ClusterPki::new(Duration::from_secs(60)).unwrap()),
            api_port: 1,
            kubernetes_version: "v1".into(),
            job: (1, None),
            mark: String::new(),
            secret: String::new(),
            pods_grace: Duration::ZERO,
            pods_as_steps: false,
        };
        let listener = EnrolmentListener::new(shared, 2, mpsc::unbounded_channel().0);
        listener.add_nodes(["node1", "node2"].map(|node| (node.to_owned(), NodePlan::default())));
        listener
    }

    fn request(node: &str, token: Option<&str>) -> JoinRequest {
        JoinRequest {
            version: COMPATIBLE_VERSION.into(),
            node: node.into(),
            token: token.map(str::to_owned),
            client_key_pem: new_key(node).unwrap().public_key_pem(),
            server_key_pem: new_key(node).unwrap().public_key_pem(),
            addresses: Vec::new(),
        }
    }

    fn token_for(listener: &EnrolmentListener, node: &str) -> String {
        let config = listener.join_config(&[node.to_owned()], Vec::new());
        config.unwrap().token
    }

    #[test]
    fn token_admits_its_node_once() {
        let listener = listener();
        let admitted =
            |node: &str, token: &str| listener.admit(&request(node, Some(token)), None).is_ok();
        let first = token_for(&listener, "node1");
        let second = token_for(&listener, "node2");
        assert!(!admitted("node1", &second));
        assert!(!admitted("node2", &first));
        assert!(!admitted("node3", &first));
        assert!(admitted("node1", &first));
        assert!(!admitted("node1", &first), "used twice");
        assert!(admitted("node2", &second));
    }

    #[test]
    fn node_added_later_is_admitted() {
        let listener = listener();
        let token = token_for(&listener, "node3");
        let late = request("node3", Some(&token));
        assert!(listener.admit(&late, None).is_err());
        listener.add_nodes([("node3".to_owned(), NodePlan::default())]);
        listener.admit(&late, None).unwrap();
    }

    #[test]
    fn removed_node_is_ended_and_refused() {
        let listener = listener();
        let token = token_for(&listener, "node1");
        let (sender, mut messages) = mpsc::unbounded_channel();
        let key = String::new();
        let member = Member { key, sender };
        let members = &listener.members;
        members.lock().unwrap().insert("node1".to_owned(), member);
        listener.remove_node("node1");
        assert!(matches!(messages.try_recv(), Ok(LeaderMessage::End)));
        let admitted = |token, certificate_node| {
            listener
                .admit(&request("node1", token), certificate_node)
                .is_ok()
        };
        assert!(!admitted(Some(token.as_str()), None));
        assert!(!admitted(None, Some("node1")));
        listener.add_nodes([("node1".to_owned(), NodePlan::default())]);
        assert!(!admitted(Some(token.as_str()), None));
    }

    #[test]
    fn connected_agent_keeps_its_node() {
        let listener = listener();
        let (first, second) = (request("node1", None), request("node1", None));
        assert!(!listener.is_taken(&first));
        let member = Member {
            key: first.client_key_pem.clone(),
            sender: mpsc::unbounded_channel().0,
        };
        listener
            .members
            .lock()
            .unwrap()
            .insert("node1".to_owned(), member);
        assert!(!listener.is_taken(&first));
        assert!(listener.is_taken(&second));
        assert!(!listener.is_taken(&request("node2", None)));
    }

    #[test]
    fn certificate_admits_its_node_until_close() {
        let listener = listener();
        let admitted = |certificate_node: Option<&str>| {
            listener
                .admit(&request("node1", None), certificate_node)
                .is_ok()
        };
        assert!(admitted(Some("node1")));
        assert!(!admitted(Some("node2")));
        assert!(!admitted(None));
        listener.close();
        assert!(!admitted(Some("node1")));
    }

    #[tokio::test]
    async fn held_connections_do_not_keep_agents_out() {
        let mut enrolment = listener();
        let limits = Arc::get_mut(&mut enrolment).unwrap();
        limits.unauthenticated = UnauthenticatedConnections::new(2);
        // Only eviction makes room.
        limits.authentication_timeout = Duration::from_secs(3600);
        let config = enrolment
            .join_config(&["node1".to_owned()], Vec::new())
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(enrolment.serve(listener));
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(TcpStream::connect(address).await.unwrap());
        }

        let mut roots = rustls::RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(config.ca_pem.as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let client = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let enrol = async {
            let stream = TcpStream::connect(address).await.unwrap();
            let name = LEADER_NAME.try_into().unwrap();
            let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
            let mut stream = MessageStream::new(connector.connect(name, stream).await.unwrap());
            let hello = Box::new(request("node1", Some(&config.token)));
            stream.send(&AgentMessage::Hello(hello)).await.unwrap();
            let response = stream.receive::<LeaderMessage>().await.unwrap();
            assert!(matches!(response, Some(LeaderMessage::Welcome(_))));
            stream
        };
        let limit = Duration::from_secs(60);
        let mut stream = tokio::time::timeout(limit, enrol).await.unwrap();
        // The oldest connection is closed. A member's connection is never evicted.
        for _ in 0..4 {
            held.push(TcpStream::connect(address).await.unwrap());
        }
        let closed = held[0].readable();
        tokio::time::timeout(limit, closed).await.unwrap().unwrap();
        assert_eq!(held[0].try_read(&mut [0]).unwrap(), 0);
        let message = stream.receive::<LeaderMessage>();
        let message = tokio::time::timeout(Duration::from_millis(300), message).await;
        assert!(message.is_err(), "the agent's connection was closed");
        serving.abort();
    }
}
