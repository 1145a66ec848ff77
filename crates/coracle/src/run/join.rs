//! Where agents report to the leader: a TCP port with TLS, at which a single-use token or a certificate
//! of the cluster admits the nodes of the allocation and nobody else.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use control_plane::ClusterPki;
use control_plane::pki::{CertificateSubject, CertificateUsage};
use kubelet_api::{UnauthenticatedConnections, UnauthenticatedSlot};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::plan::NodePlan;
use crate::handover::{
    Handover, Hello, LEADER_NAME, ToLeader, ToNode, VERSION, Welcome, Wire, notice_silence,
};
use crate::token;

/// How many connections may be open at once whose client has not authenticated, beside those of the nodes themselves. Every
/// user of the host can open some.
const MAX_UNAUTHENTICATED: usize = 512;
/// How long a client may take to authenticate.
const HELLO_TIMEOUT: Duration = Duration::from_secs(3);

/// What happens at the leader's door.
#[derive(Debug)]
pub enum NodeEvent {
    /// An agent was admitted.
    Joined,
    /// Its Node is Ready.
    Registered,
    /// Slurm told it to end.
    ToldToEnd,
    /// It can't go on.
    Failed(String),
    /// It ended in order.
    Gone,
    /// It died, or its host did.
    Lost,
}

/// What every node is told alike.
pub struct Common {
    /// The cluster's authorities.
    pub pki: Arc<ClusterPki>,
    /// The API server's port.
    pub api_port: u16,
    /// The version of Kubernetes.
    pub kubernetes_version: String,
    /// The job, and the step whose tasks wait for the leader.
    pub job: (u32, Option<u32>),
    /// What processes of the cluster carry in their environment.
    pub mark: String,
    /// From which nodes know their directories and keys.
    pub secret: String,
    /// How long pods have to end when the cluster does.
    pub pods_grace: Duration,
    /// Pods are steps of the job unless they say otherwise.
    pub pods_as_steps: bool,
}

/// The leader's door.
pub struct Door {
    common: Common,
    plans: HashMap<String, NodePlan>,
    /// Nodes that may still come in by a token, and by which.
    expected: Mutex<HashMap<String, String>>,
    unauthenticated: Arc<UnauthenticatedConnections>,
    hello_timeout: Duration,
    /// Nobody comes in any more.
    closed: AtomicBool,
    /// How to speak to those that are in.
    inside: Mutex<HashMap<String, Inside>>,
    events: mpsc::UnboundedSender<(String, NodeEvent)>,
}

/// An agent that is in.
struct Inside {
    /// Its public key, which is the same when it comes in again after its line was broken, and no other agent's.
    key: String,
    sender: mpsc::UnboundedSender<ToNode>,
}

impl Door {
    /// A door for the nodes of `plans`; none is expected yet.
    pub fn new(
        common: Common,
        plans: HashMap<String, NodePlan>,
        events: mpsc::UnboundedSender<(String, NodeEvent)>,
    ) -> anyhow::Result<Arc<Self>> {
        let limit = MAX_UNAUTHENTICATED + plans.len();
        Ok(Arc::new(Self {
            common,
            expected: Mutex::default(),
            unauthenticated: UnauthenticatedConnections::new(limit),
            hello_timeout: HELLO_TIMEOUT,
            closed: AtomicBool::new(false),
            plans,
            inside: Mutex::default(),
            events,
        }))
    }

    /// What the agents of `nodes` are told so that they find the door: with a token of their own, which
    /// lets each of them in once.
    pub fn handover(&self, nodes: &[String], leaders: Vec<SocketAddr>) -> anyhow::Result<Handover> {
        let token = token::new()?;
        let mut expected = lock(&self.expected);
        expected.extend(nodes.iter().map(|node| (node.clone(), token.clone())));
        Ok(Handover {
            version: VERSION.to_owned(),
            leaders,
            ca_pem: self.common.pki.join.cert_pem().to_owned(),
            token,
            time: crate::handover::now(),
            secret: self.common.secret.clone(),
        })
    }

    /// Tells every node that the cluster ends.
    pub fn end(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for agent in lock(&self.inside).values() {
            let _ = agent.sender.send(ToNode::End);
        }
    }

    /// The nodes that are in.
    pub fn inside(&self) -> HashSet<String> {
        lock(&self.inside).keys().cloned().collect()
    }

    /// Serves the door until the task is dropped.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) -> anyhow::Result<()> {
        let acceptor = TlsAcceptor::from(Arc::new(self.tls()?));
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an agent");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let slot = self.unauthenticated.admit();
            let (door, acceptor) = (self.clone(), acceptor.clone());
            tokio::spawn(async move {
                if let Err(error) = door.welcome(stream, acceptor, slot).await {
                    tracing::debug!(%from, error = format!("{error:#}"), "turned away");
                }
            });
        }
    }

    fn tls(&self) -> anyhow::Result<rustls::ServerConfig> {
        let join = &self.common.pki.join;
        let subject = CertificateSubject::server(LEADER_NAME, vec![LEADER_NAME.to_owned()]);
        let identity = join.issue(&subject, CertificateUsage::Server)?;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(join.cert_pem().as_bytes())?)?;
        // An agent's first visit is admitted by the token, later ones by the certificate it got.
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

    async fn welcome(
        &self,
        stream: TcpStream,
        acceptor: TlsAcceptor,
        slot: UnauthenticatedSlot,
    ) -> anyhow::Result<()> {
        notice_silence(&stream)?;
        let greeting = async {
            let stream = acceptor.accept(stream).await?;
            let certified = certified_node(&stream)?;
            let mut wire = Wire::new(stream);
            match wire.receive::<ToLeader>().await? {
                Some(ToLeader::Hello(hello)) => anyhow::Ok((wire, hello, certified)),
                _ => bail!("the first message is no greeting"),
            }
        };
        let (mut wire, hello, certified) = tokio::select! {
            greeted = tokio::time::timeout(self.hello_timeout, greeting) => greeted??,
            () = slot.evicted() => bail!("evicted by newer unauthenticated connections"),
        };
        let welcome = match self.admit(&hello, certified.as_deref()) {
            Ok(welcome) => welcome,
            Err(refusal) => {
                let refused = ToNode::Refused(format!("{refusal:#}"));
                tokio::time::timeout(self.hello_timeout, wire.send(&refused)).await??;
                return Err(refusal);
            }
        };
        // The token is used up, so nothing may come between this and the answer.
        drop(slot);
        if self.is_taken(&hello) {
            // Two agents of one node would fight for its pods: who is in, stays in.
            wire.send(&ToNode::Replaced).await?;
            bail!("another agent of this node is in");
        }
        if let Err(error) = wire.send(&ToNode::Welcome(Box::new(welcome))).await {
            // It doesn't know that it was let in, and comes again with the same token.
            if let Some(token) = hello.token {
                lock(&self.expected).insert(hello.node, token);
            }
            return Err(error);
        }
        self.keep(&hello, wire).await;
        Ok(())
    }

    /// Whether another agent has this one's node.
    fn is_taken(&self, hello: &Hello) -> bool {
        let inside = lock(&self.inside);
        let there = inside.get(&hello.node);
        there.is_some_and(|there| there.key != hello.client_key_pem)
    }

    /// Decides about a greeting.
    fn admit(&self, hello: &Hello, certified: Option<&str>) -> anyhow::Result<Welcome> {
        let node = hello.node.as_str();
        let plan = self
            .plans
            .get(node)
            .context("this node is not part of the cluster")?;
        if self.closed.load(Ordering::Relaxed) {
            bail!("the cluster is ending");
        }
        if hello.version != VERSION {
            bail!("it runs Coracle {}, the leader {VERSION}", hello.version);
        }
        match (&hello.token, certified) {
            (None, Some(name)) if name == node => {}
            (Some(token), None) => {
                let mut expected = lock(&self.expected);
                if !expected
                    .get(node)
                    .is_some_and(|wanted| token::same(token, wanted))
                {
                    bail!("its token is wrong or was used before");
                }
                expected.remove(node);
            }
            _ => bail!("neither a token nor a certificate of this node"),
        }
        self.certify(hello, plan)
    }

    fn certify(&self, hello: &Hello, plan: &NodePlan) -> anyhow::Result<Welcome> {
        let pki = &self.common.pki;
        let user =
            CertificateSubject::user(format!("system:node:{}", hello.node), Some("system:nodes"));
        let peer = CertificateSubject::user(hello.node.as_str(), None);
        let mut names = vec![hello.node.clone()];
        names.extend(hello.addresses.iter().map(ToString::to_string));
        let server = CertificateSubject::server(format!("system:node:{}", hello.node), names);
        Ok(Welcome {
            client_cert_pem: pki.client.sign(
                &user,
                CertificateUsage::Client,
                &hello.client_key_pem,
            )?,
            join_cert_pem: pki
                .join
                .sign(&peer, CertificateUsage::Client, &hello.client_key_pem)?,
            server_cert_pem: pki.kubelet.sign(
                &server,
                CertificateUsage::Server,
                &hello.server_key_pem,
            )?,
            cluster_ca_pem: pki.cluster.cert_pem().to_owned(),
            kubelet_client_ca_pem: pki.kubelet_client.cert_pem().to_owned(),
            api_port: self.common.api_port,
            cpus: plan.cpus,
            memory_bytes: plan.memory_bytes,
            extended: plan.extended.clone(),
            labels: plan.labels.clone(),
            kubernetes_version: self.common.kubernetes_version.clone(),
            job: self.common.job,
            mark: self.common.mark.clone(),
            pod_cidr: plan.pod_cidr.clone(),
            pods_grace: self.common.pods_grace,
            pods_as_steps: self.common.pods_as_steps,
        })
    }

    /// Carries messages both ways until the node ends or is lost.
    async fn keep(&self, hello: &Hello, mut wire: Wire<TlsStream<TcpStream>>) {
        let node = hello.node.as_str();
        let (sender, mut to_node) = mpsc::unbounded_channel();
        let agent = Inside {
            key: hello.client_key_pem.clone(),
            sender: sender.clone(),
        };
        if let Some(before) = lock(&self.inside).insert(node.to_owned(), agent) {
            let _ = before.sender.send(ToNode::Replaced);
        }
        let tell = |event| drop(self.events.send((node.to_owned(), event)));
        tell(NodeEvent::Joined);
        let last = loop {
            tokio::select! {
                Some(message) = to_node.recv() => {
                    if wire.send(&message).await.is_err() {
                        break NodeEvent::Lost;
                    }
                }
                message = wire.receive() => match message {
                    Ok(Some(ToLeader::Registered)) => tell(NodeEvent::Registered),
                    Ok(Some(ToLeader::ToldToEnd)) => tell(NodeEvent::ToldToEnd),
                    Ok(Some(ToLeader::Failed(problem))) => break NodeEvent::Failed(problem),
                    Ok(Some(ToLeader::Gone)) => break NodeEvent::Gone,
                    Ok(Some(ToLeader::Hello(_))) => {}
                    Ok(None) | Err(_) => break NodeEvent::Lost,
                },
            }
        };
        let mut inside = lock(&self.inside);
        // A successor may have come in already.
        if inside
            .get(node)
            .is_some_and(|current| current.sender.same_channel(&sender))
        {
            inside.remove(node);
            tell(last);
        }
    }
}

/// The node that a visitor's certificate names.
fn certified_node(stream: &TlsStream<TcpStream>) -> anyhow::Result<Option<String>> {
    let (_, connection) = stream.get_ref();
    let Some([certificate, ..]) = connection.peer_certificates() else {
        return Ok(None);
    };
    let name = kubelet_api::certificate_common_name(certificate)
        .context("its certificate names nobody")?;
    Ok(Some(name))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_plane::pki::new_key;

    fn door() -> Arc<Door> {
        let common = Common {
            pki: Arc::new(ClusterPki::new(Duration::from_secs(60)).unwrap()),
            api_port: 1,
            kubernetes_version: "v1".into(),
            job: (1, None),
            mark: String::new(),
            secret: String::new(),
            pods_grace: Duration::ZERO,
            pods_as_steps: false,
        };
        let plans = ["node1", "node2"].map(|node| (node.to_owned(), NodePlan::default()));
        Door::new(common, plans.into(), mpsc::unbounded_channel().0).unwrap()
    }

    fn hello(node: &str, token: Option<&str>) -> Hello {
        Hello {
            version: VERSION.into(),
            node: node.into(),
            token: token.map(str::to_owned),
            client_key_pem: new_key(node).unwrap().public_key_pem(),
            server_key_pem: new_key(node).unwrap().public_key_pem(),
            addresses: Vec::new(),
        }
    }

    #[test]
    fn a_token_lets_its_nodes_in_once() {
        let door = door();
        let first = door
            .handover(&["node1".to_owned()], Vec::new())
            .unwrap()
            .token;
        let second = door
            .handover(&["node2".to_owned()], Vec::new())
            .unwrap()
            .token;
        for (node, token) in [
            ("node1", second.as_str()),
            ("node2", &first),
            ("node3", &first),
        ] {
            assert!(
                door.admit(&hello(node, Some(token)), None).is_err(),
                "{node}"
            );
        }
        door.admit(&hello("node1", Some(&first)), None).unwrap();
        assert!(
            door.admit(&hello("node1", Some(&first)), None).is_err(),
            "used twice"
        );
        door.admit(&hello("node2", Some(&second)), None).unwrap();
    }

    #[test]
    fn an_agent_may_come_again_but_no_other_while_it_is_in() {
        let door = door();
        let (first, second) = (hello("node1", None), hello("node1", None));
        assert!(!door.is_taken(&first));
        let inside = Inside {
            key: first.client_key_pem.clone(),
            sender: mpsc::unbounded_channel().0,
        };
        lock(&door.inside).insert("node1".to_owned(), inside);
        assert!(!door.is_taken(&first));
        assert!(door.is_taken(&second));
        assert!(!door.is_taken(&hello("node2", None)));
    }

    #[test]
    fn a_certificate_lets_its_own_node_in_until_the_end() {
        let door = door();
        door.admit(&hello("node1", None), Some("node1")).unwrap();
        assert!(door.admit(&hello("node1", None), Some("node2")).is_err());
        assert!(door.admit(&hello("node1", None), None).is_err());
        door.end();
        assert!(door.admit(&hello("node1", None), Some("node1")).is_err());
    }

    #[tokio::test]
    async fn held_connections_do_not_keep_agents_out() {
        let mut door = door();
        let limits = Arc::get_mut(&mut door).unwrap();
        limits.unauthenticated = UnauthenticatedConnections::new(2);
        // Nothing but eviction makes room.
        limits.hello_timeout = Duration::from_secs(3600);
        let handover = door.handover(&["node1".to_owned()], Vec::new()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(door.serve(listener));
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(TcpStream::connect(address).await.unwrap());
        }

        let mut roots = rustls::RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(handover.ca_pem.as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let client = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let enrol = async {
            let stream = TcpStream::connect(address).await.unwrap();
            let name = LEADER_NAME.try_into().unwrap();
            let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
            let mut wire = Wire::new(connector.connect(name, stream).await.unwrap());
            let hello = Box::new(hello("node1", Some(&handover.token)));
            wire.send(&ToLeader::Hello(hello)).await.unwrap();
            let welcome = wire.receive::<ToNode>().await.unwrap();
            assert!(matches!(welcome, Some(ToNode::Welcome(_))));
            wire
        };
        let limit = Duration::from_secs(60);
        let mut wire = tokio::time::timeout(limit, enrol).await.unwrap();
        // The oldest is closed, and an agent is not among those that may be.
        for _ in 0..4 {
            held.push(TcpStream::connect(address).await.unwrap());
        }
        let closed = held[0].readable();
        tokio::time::timeout(limit, closed).await.unwrap().unwrap();
        assert_eq!(held[0].try_read(&mut [0]).unwrap(), 0);
        let silent = wire.receive::<ToNode>();
        let silent = tokio::time::timeout(Duration::from_millis(300), silent).await;
        assert!(silent.is_err(), "the agent was cut");
        serving.abort();
    }
}
