//! The leader's enrolment listener: a TCP port with TLS. A single-use token or a certificate of the cluster
//! admits the cluster's nodes, and no other client.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, bail};
use client_auth::{UnauthenticatedConnections, UnauthenticatedSlot};
use control_plane::ClusterPki;
use control_plane::pki::{CertificateSubject, CertificateUsage};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::HostPathMapping;
use super::protocol::{
    AgentMessage, COMPATIBLE_VERSION, JoinConfig, JoinRequest, JoinResponse, LEADER_NAME,
    LeaderMessage, MessageStream, enable_keepalive, unix_time,
};
use crate::node_plan::NodePlan;
use crate::token;

/// Limit on connections whose client has not authenticated yet, beside one per node: every user of the host can open some.
const MAX_UNAUTHENTICATED_AGENTS: usize = 512;
/// Time that a client has to authenticate.
const AGENT_AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(3);

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
    /// Paths of hostPath volumes that lead to other directories.
    pub host_path_mappings: Vec<HostPathMapping>,
}

/// Admits the agents of the cluster's nodes and holds their connections.
pub struct EnrolmentListener {
    shared: SharedNodeConfig,
    roster: Mutex<Roster>,
    unauthenticated: Arc<UnauthenticatedConnections>,
    authentication_timeout: Duration,
    events: mpsc::UnboundedSender<(String, NodeEvent)>,
}

/// The nodes that may enrol and those that have. One lock protects all of it: an agent becomes a member in the same moment in which it is
/// admitted, so that every `End` reaches it.
#[derive(Default)]
struct Roster {
    /// The nodes that may enrol. Membership may change while the cluster runs.
    nodes: HashMap<String, NodePlan>,
    /// Tokens that have not been used, by node.
    tokens: HashMap<String, String>,
    /// The cluster is ending: no agent is admitted any more.
    closed: bool,
    members: HashMap<String, Member>,
}

/// A node whose agent is connected.
struct Member {
    /// The agent's public key: the same when it reconnects, and different for every other agent.
    key: String,
    sender: mpsc::UnboundedSender<LeaderMessage>,
}

/// An admitted agent, seen from its connection.
struct Admission {
    response: JoinResponse,
    /// Identifies the member.
    sender: mpsc::UnboundedSender<LeaderMessage>,
    outgoing: mpsc::UnboundedReceiver<LeaderMessage>,
    /// This connection has replaced another one of the same agent.
    is_reconnection: bool,
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
            roster: Mutex::default(),
            unauthenticated: UnauthenticatedConnections::new(
                MAX_UNAUTHENTICATED_AGENTS + expected_nodes,
            ),
            authentication_timeout: AGENT_AUTHENTICATION_TIMEOUT,
            events,
        })
    }

    /// Lets these nodes enrol, from now on.
    pub fn add_nodes(&self, nodes: impl IntoIterator<Item = (String, NodePlan)>) {
        self.roster().nodes.extend(nodes);
    }

    /// Ends the agent of a node, and lets it enrol no more. Returns whether the agent was connected, and thus reports its end.
    pub fn remove_node(&self, node: &str) -> bool {
        let mut roster = self.roster();
        roster.nodes.remove(node);
        roster.tokens.remove(node);
        let member = roster.members.get(node);
        member.is_some_and(|member| member.sender.send(LeaderMessage::End).is_ok())
    }

    /// The configuration with which the agents of `nodes` enrol. Its token admits each of them once.
    pub fn join_config(
        &self,
        nodes: &[String],
        leader_addresses: Vec<SocketAddr>,
    ) -> anyhow::Result<JoinConfig> {
        let token = token::generate()?;
        let tokens = nodes.iter().map(|node| (node.clone(), token.clone()));
        self.roster().tokens.extend(tokens);
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
        let mut roster = self.roster();
        roster.closed = true;
        for member in roster.members.values() {
            let _ = member.sender.send(LeaderMessage::End);
        }
    }

    /// The nodes whose agents are connected.
    pub fn members(&self) -> HashSet<String> {
        self.roster().members.keys().cloned().collect()
    }

    fn roster(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap()
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
        let admission = match self.admit(&request, certificate_node.as_deref()) {
            Ok(admission) => admission,
            Err(reason) => {
                let refused = LeaderMessage::Refused(format!("{reason:#}"));
                tokio::time::timeout(self.authentication_timeout, stream.send(&refused)).await??;
                return Err(reason);
            }
        };
        // The token is used up: from here on, eviction must not interrupt.
        drop(slot);
        let Some(admission) = admission else {
            stream.send(&LeaderMessage::NodeTaken).await?;
            bail!("another agent of this node is connected");
        };
        self.serve_member(&request, admission, stream).await
    }

    /// Checks a request: membership, version, and token or certificate. If it is valid, the agent is a member from now on. `None` if
    /// another agent of this node is connected: two would compete for its pods, and the connected one keeps the node.
    fn admit(
        &self,
        request: &JoinRequest,
        certificate_node: Option<&str>,
    ) -> anyhow::Result<Option<Admission>> {
        let node = request.node.as_str();
        let mut roster = self.roster();
        let plan = roster.nodes.get(node);
        let plan = plan
            .cloned()
            .context("this node is not part of the cluster")?;
        if roster.closed {
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
                let unused = roster.tokens.get(node);
                if !unused.is_some_and(|unused| token::equal(token, unused)) {
                    bail!("the token is wrong or was used before");
                }
                roster.tokens.remove(node);
            }
            _ => bail!("neither a token nor a certificate of this node"),
        }
        let current = roster.members.get(node);
        if current.is_some_and(|member| member.key != request.client_key_pem) {
            return Ok(None);
        }
        let response = self.sign_certificates(request, &plan)?;
        let (sender, outgoing) = mpsc::unbounded_channel();
        let member = Member {
            key: request.client_key_pem.clone(),
            sender: sender.clone(),
        };
        let replaced = roster.members.insert(node.to_owned(), member);
        if let Some(replaced) = &replaced {
            let _ = replaced.sender.send(LeaderMessage::NodeTaken);
        }
        Ok(Some(Admission {
            response,
            sender,
            outgoing,
            is_reconnection: replaced.is_some(),
        }))
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
            host_path_mappings: self.shared.host_path_mappings.clone(),
        })
    }

    /// Welcomes a member, then carries messages both ways until it leaves or its connection breaks.
    async fn serve_member<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        request: &JoinRequest,
        admission: Admission,
        mut stream: MessageStream<S>,
    ) -> anyhow::Result<()> {
        let node = request.node.as_str();
        let Admission {
            response,
            sender,
            mut outgoing,
            is_reconnection,
        } = admission;
        let report = |event| drop(self.events.send((node.to_owned(), event)));
        let welcome = LeaderMessage::Welcome(Box::new(response));
        if let Err(error) = stream.send(&welcome).await {
            let mut roster = self.roster();
            // The agent does not know that it was admitted, and retries with the same token.
            if let Some(token) = request.token.clone()
                && roster.nodes.contains_key(node)
            {
                roster.tokens.insert(node.to_owned(), token);
            }
            if roster.remove_member(node, &sender) && is_reconnection {
                report(NodeEvent::Lost);
            }
            return Err(error);
        }
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
        if self.roster().remove_member(node, &sender) {
            report(last_event);
        }
        Ok(())
    }
}

impl Roster {
    /// Removes a member, unless a newer connection of the same agent has replaced the one with `sender`.
    fn remove_member(&mut self, node: &str, sender: &mpsc::UnboundedSender<LeaderMessage>) -> bool {
        let current = self.members.get(node);
        let is_current = current.is_some_and(|member| member.sender.same_channel(sender));
        if is_current {
            self.members.remove(node);
        }
        is_current
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
            host_path_mappings: vec![],
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
        let mut member = listener.admit(&request("node1", None), Some("node1"));
        let member = member.as_mut().unwrap().as_mut().unwrap();
        let token = token_for(&listener, "node1");
        assert!(listener.remove_node("node1"));
        assert!(matches!(member.outgoing.try_recv(), Ok(LeaderMessage::End)));
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
        let admit = |request: &JoinRequest| {
            let admitted = listener.admit(request, Some(&request.node)).unwrap();
            admitted.map(|admission| admission.is_reconnection)
        };
        assert_eq!(admit(&first), Some(false));
        assert_eq!(admit(&first), Some(true));
        assert_eq!(admit(&second), None);
        assert_eq!(admit(&request("node2", None)), Some(false));
    }

    #[tokio::test]
    async fn end_reaches_agent_that_is_being_welcomed() {
        for end in [
            |listener: &EnrolmentListener| assert!(listener.remove_node("node1")),
            EnrolmentListener::close,
        ] {
            let listener = listener();
            let request = request("node1", None);
            // The welcome does not fit into the buffer.
            let (agent, leader) = tokio::io::duplex(64);
            let (mut agent, leader) = (MessageStream::new(agent), MessageStream::new(leader));
            let admission = listener.admit(&request, Some("node1")).unwrap().unwrap();
            let serving = tokio::spawn({
                let listener = listener.clone();
                async move { listener.serve_member(&request, admission, leader).await }
            });
            tokio::task::yield_now().await;
            end(&listener);
            for is_expected in [
                |message: &LeaderMessage| matches!(message, LeaderMessage::Welcome(_)),
                |message: &LeaderMessage| matches!(message, LeaderMessage::End),
            ] {
                let message = agent.receive::<LeaderMessage>();
                let message = tokio::time::timeout(Duration::from_secs(60), message).await;
                assert!(is_expected(&message.unwrap().unwrap().unwrap()));
            }
            assert!(listener.members().contains("node1"));
            agent.send(&AgentMessage::Left).await.unwrap();
            serving.await.unwrap().unwrap();
            assert!(listener.members().is_empty());
        }
    }

    #[tokio::test]
    async fn agent_that_was_not_welcomed_is_no_member() {
        let listener = listener();
        let token = token_for(&listener, "node1");
        let request = request("node1", Some(&token));
        let admission = listener.admit(&request, None).unwrap().unwrap();
        assert!(listener.members().contains("node1"));
        let (agent, leader) = tokio::io::duplex(64);
        drop(agent);
        let leader = MessageStream::new(leader);
        let served = listener.serve_member(&request, admission, leader).await;
        served.unwrap_err();
        assert!(listener.members().is_empty());
        let retry = super::tests::request("node1", Some(&token));
        assert!(listener.admit(&retry, None).unwrap().is_some());
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
