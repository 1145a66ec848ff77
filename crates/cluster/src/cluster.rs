//! One cluster as its leader sees it: the control plane, the enrolment of its nodes, and the steps in which their agents
//! run.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use console::{Failure, FailureCode, Phases, print_stderr};
use control_plane::components::{address_range, first_service_address};
use control_plane::port::{ReservedPort, find_free_port};
use control_plane::{
    ClusterConfig, ClusterKeys, ClusterPki, ClusterStorage, ControlPlaneEvent, KeysError,
};
use releases::Release;
use slurm::{Allocation, JobDetail, NodeShare, Slurm, SlurmError};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::agents::{AgentStarter, AgentSteps, StepFailure};
use crate::control_plane::ControlPlaneProcess;
use crate::enrolment::{
    EnrolmentListener, HostPathMapping, NodeEvent, SharedNodeConfig, unix_time,
};
use crate::grace::GracePeriods;
use crate::node_plan::{NodePlan, NodePlanner};
use crate::{carry, node_resources, objects, slurm_failure, token};

/// Kubernetes' default range of node ports. Workload scripts get one of them as `K8S_PORT`, as in KSI (docs/guide.md).
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30000..=32767;
/// Lifetime of certificates in a job without a time limit.
const MAX_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// Certificates are valid this much longer than the job, because clocks differ.
const EXTRA_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Delay before a lost agent is restarted; it grows with each restart, up to the maximum.
const RESTART_DELAY: Duration = Duration::from_secs(2);
const MAX_RESTART_DELAY: Duration = Duration::from_secs(60);

/// Why a running cluster ended by itself.
#[derive(Debug)]
pub enum ClusterEnd {
    /// Slurm ends the job: time limit or cancellation.
    JobEnded,
    /// The control plane failed.
    ControlPlaneFailed(Failure),
}

enum ClusterEvent {
    ControlPlane(Result<ControlPlaneEvent, Failure>),
    Node(String, NodeEvent),
    Step(StepFailure),
    /// The restart delay of this node's agent is over.
    Restart(String),
}

/// Parameters of a cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// The pod range.
    pub pod_cidr: String,
    /// The service range.
    pub service_cidr: String,
    /// The API server's port; 0 for any free one.
    pub api_port: u16,
    /// Launch pods as Slurm steps, unless their annotation chooses otherwise.
    pub pods_as_steps: bool,
    /// Paths of hostPath volumes that lead to other directories.
    pub host_path_mappings: Vec<HostPathMapping>,
    /// Where the cluster's objects are kept.
    pub storage: ClusterStorage,
    /// Where its keys come from.
    pub keys: ClusterKeys,
    /// Whether its nodes may change.
    pub membership: ClusterMembership,
    /// Whether the workload is a program outside of pods. It gets a grace period of its own, before that of the pods.
    pub has_program: bool,
    /// Print the logs of components and agents.
    pub verbose: bool,
    /// The directory for the components' logs; memory otherwise.
    pub log_dir: Option<PathBuf>,
}

/// Whether the nodes of a cluster may change while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClusterMembership {
    /// All nodes of the allocation, from start to end. The cluster does not start if one of them cannot join.
    Fixed,
    /// First the nodes of the allocation, then others too; see [`Cluster::add_nodes`] and [`Cluster::remove_node`].
    Changing,
}

/// A running cluster.
pub struct Cluster {
    /// The cluster's name, `coracle-JOB-xxxx`.
    pub name: String,
    /// The value of [`crate::WORKLOAD_MARK`] in the environment of its workload.
    pub mark: String,
    /// An administrator's token, for scripts that speak to the API themselves.
    pub token: String,
    /// A free node port for workload scripts.
    pub node_port: u16,
    /// The URL of its API.
    pub api: String,
    /// An administrator's client.
    pub client: kube::Client,
    /// Grace periods of its parts.
    pub grace: GracePeriods,
    control_plane: ControlPlaneProcess,
    verbose: bool,
    membership: ClusterMembership,
    planner: NodePlanner,
    seeded: bool,
    /// The resources of the nodes with which it started.
    shares: Vec<NodeShare>,
    pki: Arc<ClusterPki>,
    enrolment: Arc<EnrolmentListener>,
    starter: AgentStarter,
    leader_addresses: Vec<SocketAddr>,
    steps: AgentSteps,
    node_events: mpsc::UnboundedReceiver<(String, NodeEvent)>,
    step_failures: mpsc::UnboundedReceiver<StepFailure>,
    waiting_for: BTreeSet<String>,
    /// Nodes that are lost, with the number of restarts of their agents.
    lost: HashMap<String, u32>,
    /// Lost nodes whose agents wait for their restart.
    restarting: BTreeSet<String>,
    restarts: (
        mpsc::UnboundedSender<String>,
        mpsc::UnboundedReceiver<String>,
    ),
    _api_port: ReservedPort,
}

impl Cluster {
    /// Starts the control plane and the agents, and returns before any of them has responded.
    pub async fn launch(
        options: &ClusterOptions,
        allocation: &Allocation,
        release: &Release,
        seed: Option<PathBuf>,
        slurm: Slurm,
    ) -> anyhow::Result<Self> {
        let seeded = seed.is_some();
        // Two clusters in one job need different names, so that their kubeconfigs cannot be confused.
        let random = token::generate()?;
        let name = format!("coracle-{}-{}", allocation.job_id, &random[..4]);
        let mark = format!("{name}-{}", &random[4..20]);
        let addresses = linux::address::host_addresses()?;
        let advertised = advertised_address(&addresses)?;
        check_cidrs(&addresses, options)?;
        let api_port = reserve_api_port(options.api_port)?;
        let (detail, kill_wait) =
            tokio::join!(slurm.job_detail(allocation.job_id), slurm.kill_wait());
        let detail = detail.map_err(slurm_failure)?;
        let grace = GracePeriods::within_kill_wait(kill_wait.ok().flatten(), options.has_program);
        let pki = ClusterPki::open(&options.keys, certificate_lifetime(&detail));
        let pki = Arc::new(pki.map_err(keys_failure)?);
        let admin = pki.administrator()?;
        let api = SocketAddr::new(advertised, api_port.number());
        let token = token::generate()?;
        let mut files = pki.files(api_server_names(&addresses, &options.service_cidr))?;
        files.insert(
            "tokens.csv".into(),
            format!("{token},admin-user,1,system:masters\n"),
        );
        let url = format!("https://{api}");
        let ca = pki.cluster.cert_pem();
        let control_plane = ControlPlaneProcess::start(ClusterConfig {
            name: name.clone(),
            release: release.dir.clone(),
            addresses: addresses.clone(),
            api_port: api_port.number(),
            service_cidr: options.service_cidr.clone(),
            pod_cidr: options.pod_cidr.clone(),
            storage: options.storage.clone(),
            seed,
            workload: carry::workload().map(|(dir, _)| dir),
            lowers_gogc: release.is_our_build(),
            log_dir: options.log_dir.as_deref().map(create_log_dir).transpose()?,
            verbose: options.verbose,
            files,
            admin_kubeconfig: control_plane::kubeconfig::kubeconfig(&name, &url, ca, &admin),
        })
        .await?;

        let shared = SharedNodeConfig {
            pki: pki.clone(),
            api_port: api_port.number(),
            kubernetes_version: release.version.clone(),
            job: (allocation.job_id, allocation.step_id),
            mark: mark.clone(),
            secret: token::generate()?,
            pods_grace: grace.pods(),
            pods_as_steps: options.pods_as_steps,
            host_path_mappings: options.host_path_mappings.clone(),
        };
        let mut planner = NodePlanner::new(allocation, &detail, &name, &options.pod_cidr)?;
        let plans = planner.plan(&allocation.nodes, &detail)?;
        let (report_node, node_events) = mpsc::unbounded_channel();
        let (report_step, step_failures) = mpsc::unbounded_channel();
        let (enrolment, enrolment_port) = start_enrolment(shared, plans, report_node).await?;
        let leader_addresses = addresses
            .iter()
            .map(|address| SocketAddr::new(*address, enrolment_port))
            .collect();
        let starter = AgentStarter::new(slurm, allocation.job_id, options.verbose, report_step)?;
        let mut cluster = Self {
            client: crate::client::connect(api, ca, &admin).await?,
            name,
            mark,
            token,
            node_port: choose_node_port()?,
            api: url,
            grace,
            control_plane,
            verbose: options.verbose,
            membership: options.membership,
            planner,
            seeded,
            shares: detail.nodes,
            pki,
            enrolment,
            starter,
            leader_addresses,
            steps: AgentSteps::default(),
            node_events,
            step_failures,
            waiting_for: allocation.nodes.iter().cloned().collect(),
            lost: HashMap::new(),
            restarting: BTreeSet::new(),
            restarts: mpsc::unbounded_channel(),
            _api_port: api_port,
        };
        cluster.start_agents(allocation.nodes.clone())?;
        Ok(cluster)
    }

    /// Waits until all nodes are Ready, Pods can be created and, if `controllers` is set, the controllers run.
    pub async fn wait_until_ready(
        &mut self,
        timeout: Duration,
        controllers: bool,
        phases: &mut Phases,
    ) -> anyhow::Result<()> {
        let total = self.waiting_for.len();
        phases.begin("control plane responds");
        match tokio::time::timeout(
            timeout,
            self.wait_for_nodes_and_objects(controllers, phases),
        )
        .await
        {
            Ok(result) => result?,
            Err(_) => return Err(self.start_timed_out(timeout).into()),
        }
        let resources = node_resources::describe(&self.shares);
        phases.finish(
            &format!("cluster {} with {} is ready", self.name, count_nodes(total)),
            &resources,
        );
        if let Some(hint) = node_resources::hint(&self.shares) {
            print_stderr(format_args!("coracle: {hint}"));
        }
        Ok(())
    }

    async fn wait_for_nodes_and_objects(
        &mut self,
        controllers: bool,
        phases: &mut Phases,
    ) -> anyhow::Result<()> {
        let total = self.waiting_for.len();
        let mut api_server_responds = false;
        while !(api_server_responds && self.waiting_for.is_empty()) {
            match self.next_event().await {
                ClusterEvent::ControlPlane(event) => {
                    let event =
                        event.map_err(|failure| failure.with_code(FailureCode::NotStarted))?;
                    if event == ControlPlaneEvent::ApiServerResponds {
                        api_server_responds = true;
                        phases.begin(format!("{} Ready", nodes_are(total)));
                    }
                    self.handle_control_plane_event(&event);
                }
                ClusterEvent::Node(node, NodeEvent::Failed(problem)) if self.is_fixed() => {
                    return Err(cannot_join(&node, &problem).into());
                }
                ClusterEvent::Node(_, NodeEvent::JobEnding) => return Err(job_ended().into()),
                ClusterEvent::Node(node, event) => self.handle_node_event(&node, &event),
                ClusterEvent::Step(failure) if self.is_fixed() => {
                    return Err(step_failure(failure).into());
                }
                ClusterEvent::Step(failure) => self.handle_step_failure(&failure),
                ClusterEvent::Restart(node) => self.restart_agent(node),
            }
        }
        phases.begin("service accounts exist");
        if !self.seeded {
            objects::create_rbac_objects(&self.client).await?;
        }
        objects::prepare_namespaces(&self.client, self.pki.cluster.cert_pem()).await?;
        if controllers {
            phases.begin("controllers run");
            objects::wait_for_controllers(&self.client).await;
        }
        Ok(())
    }

    /// Replaces lost agents until the cluster ends by itself.
    pub async fn watch(&mut self) -> ClusterEnd {
        loop {
            match self.next_event().await {
                ClusterEvent::ControlPlane(Ok(event)) => self.handle_control_plane_event(&event),
                ClusterEvent::ControlPlane(Err(failure)) => {
                    return ClusterEnd::ControlPlaneFailed(failure.with_code(FailureCode::Broken));
                }
                ClusterEvent::Node(_, NodeEvent::JobEnding) => return ClusterEnd::JobEnded,
                ClusterEvent::Node(node, event) => self.handle_node_event(&node, &event),
                ClusterEvent::Step(failure) => self.handle_step_failure(&failure),
                ClusterEvent::Restart(node) => self.restart_agent(node),
            }
        }
    }

    /// The next event of any part. Cancel-safe.
    async fn next_event(&mut self) -> ClusterEvent {
        tokio::select! {
            event = self.control_plane.next_event() => ClusterEvent::ControlPlane(event),
            Some((node, event)) = self.node_events.recv() => ClusterEvent::Node(node, event),
            Some(failure) = self.step_failures.recv() => ClusterEvent::Step(failure),
            Some(node) = self.restarts.1.recv() => ClusterEvent::Restart(node),
        }
    }

    /// Lets more nodes of the job join, and starts their agents.
    pub fn add_nodes(&mut self, nodes: Vec<String>, detail: &JobDetail) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_fixed(), "the nodes of this cluster cannot change");
        self.enrolment.add_nodes(self.planner.plan(&nodes, detail)?);
        self.waiting_for.extend(nodes.iter().cloned());
        self.start_agents(nodes)
    }

    /// Requests the agent of a node to stop its pods, delete its Node and exit. The node can join again only after
    /// [`add_nodes`](Self::add_nodes).
    pub fn remove_node(&mut self, node: &str) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_fixed(), "the nodes of this cluster cannot change");
        self.planner.remove(node);
        self.waiting_for.remove(node);
        self.lost.remove(node);
        if !self.enrolment.remove_node(node) {
            // No agent is connected that could delete the Node.
            self.delete_node(node);
        }
        Ok(())
    }

    fn delete_node(&self, node: &str) {
        let (client, node) = (self.client.clone(), node.to_owned());
        tokio::spawn(async move { objects::delete_node(&client, &node).await });
    }

    fn is_fixed(&self) -> bool {
        self.membership == ClusterMembership::Fixed
    }

    /// The nodes that are lost at the moment.
    pub fn lost_nodes(&self) -> Vec<String> {
        let mut nodes: Vec<String> = self.lost.keys().cloned().collect();
        nodes.sort();
        nodes
    }

    /// The CAs of the cluster.
    pub fn pki(&self) -> &ClusterPki {
        &self.pki
    }

    /// The leader's address that the cluster's nodes use.
    pub fn advertised_address(&self) -> Option<IpAddr> {
        self.leader_addresses.first().map(SocketAddr::ip)
    }

    /// Stops everything in order: nodes first, while the API server can still delete their Nodes, then `after_nodes`, then
    /// agents' steps and control plane.
    pub async fn stop(mut self, after_nodes: impl Future<Output = ()>) {
        self.enrolment.close();
        let all_left = async {
            while !self.enrolment.members().is_empty() {
                if self.node_events.recv().await.is_none() {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(self.grace.nodes, all_left).await;
        after_nodes.await;
        let timeout = self.grace.control_plane;
        tokio::join!(self.steps.finish(), self.control_plane.stop(timeout));
    }

    /// The control plane's directory.
    pub fn control_plane_dir(&self) -> anyhow::Result<control_plane::dir::ControlPlaneDirOfPid> {
        self.control_plane
            .dir()
            .context("the control plane is not up")
    }

    fn handle_node_event(&mut self, node: &str, event: &NodeEvent) {
        match event {
            NodeEvent::Registered => {
                self.waiting_for.remove(node);
                if self.lost.remove(node).is_some() {
                    print_stderr(format_args!("coracle: node {node} is back"));
                }
                self.steps.outlive_sruns(&self.enrolment.members());
            }
            NodeEvent::Lost => self.handle_lost_node(node, "its agent or its host died"),
            NodeEvent::Failed(problem) => self.handle_lost_node(node, problem),
            NodeEvent::Left => self.handle_left_node(node),
            NodeEvent::Joined | NodeEvent::JobEnding => {}
        }
    }

    fn handle_step_failure(&mut self, failure: &StepFailure) {
        let (nodes, problem) = match failure {
            StepFailure::Agent { node, problem } => (std::slice::from_ref(node), problem.clone()),
            StepFailure::Step { nodes, error } => (nodes.as_slice(), error.to_string()),
        };
        // Ignore the failure of a second agent of a node whose first agent is connected.
        let members = self.enrolment.members();
        for node in nodes.iter().filter(|node| !members.contains(*node)) {
            self.handle_lost_node(node, &problem);
        }
    }

    /// Handles the orderly exit of an agent after its node was removed.
    fn handle_left_node(&mut self, node: &str) {
        // Its pods have ended.
        self.planner.release(node);
        // If the node was added again, its new agent may have failed already: it waits only briefly for the node's lock,
        // which this agent held.
        if self.planner.has(node) && self.restarting.insert(node.to_owned()) {
            let (restart, node) = (self.restarts.0.clone(), node.to_owned());
            tokio::spawn(async move {
                tokio::time::sleep(RESTART_DELAY).await;
                let _ = restart.send(node);
            });
        }
    }

    /// Marks a lost node NotReady at once, and restarts its agent after a delay.
    fn handle_lost_node(&mut self, node: &str, problem: &str) {
        if !self.planner.has(node) {
            // It was removed. Its pod range stays reserved, because its pods may still run.
            self.delete_node(node);
            return;
        }
        if !self.restarting.insert(node.to_owned()) {
            return; // Its restart is scheduled already.
        }
        self.waiting_for.insert(node.to_owned());
        let restarts = self.lost.entry(node.to_owned()).or_default();
        *restarts += 1;
        let delay = RESTART_DELAY
            .saturating_mul(*restarts)
            .min(MAX_RESTART_DELAY);
        print_stderr(format_args!(
            "coracle: node {node} is lost: {problem}; restarting its agent in {} s",
            delay.as_secs()
        ));
        let (client, restart) = (self.client.clone(), self.restarts.0.clone());
        let (node, problem) = (node.to_owned(), problem.to_owned());
        tokio::spawn(async move {
            objects::mark_not_ready(&client, &node, &problem).await;
            tokio::time::sleep(delay).await;
            let _ = restart.send(node);
        });
    }

    fn restart_agent(&mut self, node: String) {
        self.restarting.remove(&node);
        if self.enrolment.members().contains(&node) || !self.planner.has(&node) {
            return; // The agent's guard has restarted it, or the node was removed.
        }
        if let Err(error) = self.start_agents(vec![node.clone()]) {
            tracing::warn!(node, %error, "cannot restart agent");
        }
    }

    fn start_agents(&mut self, nodes: Vec<String>) -> anyhow::Result<()> {
        let addresses = self.leader_addresses.clone();
        let join_config = self.enrolment.join_config(&nodes, addresses)?;
        self.steps.add(self.starter.start(nodes, &join_config)?);
        Ok(())
    }

    fn handle_control_plane_event(&self, event: &ControlPlaneEvent) {
        match event {
            // The control plane has mounted or copied the files, so their copy on this node is not needed any more.
            ControlPlaneEvent::Started { .. } => carry::remove(),
            ControlPlaneEvent::Log { component, line } if self.verbose => {
                print_stderr(format_args!("coracle: [{component}] {line}"));
            }
            ControlPlaneEvent::LogWriteFailed { component, reason } => print_stderr(format_args!(
                "coracle: warning: the log of {component} cannot be written: {reason}"
            )),
            ControlPlaneEvent::Exited { component, status } => {
                print_stderr(format_args!(
                    "coracle: {component} exited with {status}; restarting it"
                ));
            }
            _ => {}
        }
    }

    fn start_timed_out(&self, timeout: Duration) -> Failure {
        let missing: Vec<&str> = self.waiting_for.iter().map(String::as_str).collect();
        let problem = if missing.is_empty() {
            "the API server is not ready".to_owned()
        } else {
            format!("these nodes did not join: {}", missing.join(", "))
        };
        Failure::new(
            FailureCode::NotStarted,
            format!("the cluster did not start within {} s: {problem}", timeout.as_secs()),
        )
        .with_hint("`scontrol show node` shows whether they are up; --start-timeout allows more time, -v shows more")
    }
}

fn count_nodes(count: usize) -> String {
    format!("{count} node{}", if count == 1 { "" } else { "s" })
}

fn nodes_are(count: usize) -> String {
    format!(
        "{} {}",
        count_nodes(count),
        if count == 1 { "is" } else { "are" }
    )
}

/// Refuses ranges that contain an address of this host: its traffic could not be distinguished from that of pods.
fn check_cidrs(addresses: &[IpAddr], options: &ClusterOptions) -> Result<(), Failure> {
    for (option, cidr) in [
        ("--pod-cidr", &options.pod_cidr),
        ("--service-cidr", &options.service_cidr),
    ] {
        let Some(network) = address_range(cidr) else {
            continue;
        };
        let is_in_network =
            |address: &&IpAddr| matches!(address, IpAddr::V4(v4) if network.contains(v4));
        if let Some(address) = addresses.iter().find(is_in_network) {
            let message = format!("{option} {cidr} contains {address}, an address of this host");
            return Err(Failure::new(FailureCode::Usage, message).with_hint(format!(
                "choose a network that the site does not use, with {option}"
            )));
        }
    }
    Ok(())
}

/// The address by which nodes reach the API server: the host's first one, which must be an IPv4 address.
fn advertised_address(addresses: &[IpAddr]) -> Result<IpAddr, Failure> {
    let advertised = *addresses.first().ok_or_else(|| {
        Failure::new(
            FailureCode::Host,
            "this host has no network address but loopback",
        )
        .with_hint("a cluster of one node needs one too: check `ip addr`")
    })?;
    if advertised.is_ipv6() {
        return Err(Failure::new(
            FailureCode::Host,
            format!("this host has no IPv4 address, only {advertised}"),
        )
        .with_hint(
            "pods and services have IPv4 addresses, so the nodes need them too: check `ip -4 addr`",
        ));
    }
    Ok(advertised)
}

/// Opens a port on which the agents of the planned nodes enrol. Returns its number too.
async fn start_enrolment(
    shared: SharedNodeConfig,
    plans: HashMap<String, NodePlan>,
    events: mpsc::UnboundedSender<(String, NodeEvent)>,
) -> anyhow::Result<(Arc<EnrolmentListener>, u16)> {
    let listener = TcpListener::bind("0.0.0.0:0")
        .await
        .context("cannot open the enrolment port")?;
    let port = listener.local_addr()?.port();
    let enrolment = EnrolmentListener::new(shared, plans.len(), events);
    enrolment.add_nodes(plans);
    tokio::spawn(enrolment.clone().serve(listener));
    Ok((enrolment, port))
}

fn keys_failure(error: KeysError) -> Failure {
    Failure::new(FailureCode::Host, error.to_string())
        .with_source(error)
        .with_hint("the keys must belong to you alone (modes 0700 and 0600); without the directory, new keys are made")
}

fn reserve_api_port(port: u16) -> Result<ReservedPort, Failure> {
    ReservedPort::new(port).map_err(|error| {
        Failure::new(
            FailureCode::Host,
            format!("cannot use port {port} for the API server"),
        )
        .with_source(error)
        .with_hint("omit --api-port to use a free port")
    })
}

fn create_log_dir(dir: &std::path::Path) -> Result<PathBuf, Failure> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |error| {
        Failure::new(
            FailureCode::CannotWrite,
            format!("cannot create the log directory {}", dir.display()),
        )
        .with_source(error)
        .with_hint("choose a writable directory with free space")
    };
    let dir = std::path::absolute(dir).map_err(failed)?;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .map_err(failed)?;
    rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK).map_err(|error| failed(error.into()))?;
    Ok(dir)
}

fn api_server_names(addresses: &[std::net::IpAddr], service_cidr: &str) -> Vec<String> {
    let mut names: Vec<String> = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
        "127.0.0.1",
    ]
    .map(str::to_owned)
    .to_vec();
    names.extend(addresses.iter().map(ToString::to_string));
    names.extend(first_service_address(service_cidr).map(|address| address.to_string()));
    names
}

fn certificate_lifetime(detail: &JobDetail) -> Duration {
    let now = unix_time();
    match detail.end_time {
        Some(end) if end > now => Duration::from_secs(end - now) + EXTRA_CERTIFICATE_LIFETIME,
        _ => MAX_CERTIFICATE_LIFETIME,
    }
}

fn choose_node_port() -> anyhow::Result<u16> {
    if let Some(port) = std::env::var("K8S_PORT")
        .ok()
        .and_then(|port| port.parse().ok())
    {
        return Ok(port);
    }
    find_free_port(NODE_PORTS).context("no node port is free")
}

fn cannot_join(node: &str, problem: &str) -> Failure {
    Failure::new(
        FailureCode::NotStarted,
        format!("node {node} cannot join: {problem}"),
    )
    .with_hint("leave the node out with --exclude, or report it to the site's support")
}

fn job_ended() -> Failure {
    Failure::new(
        FailureCode::NotStarted,
        "Slurm ended the job while the cluster was starting",
    )
    .with_hint("`sacct -j JOB` shows why: the time limit, or scancel")
}

fn step_failure(failure: StepFailure) -> Failure {
    match failure {
        StepFailure::Agent { node, problem } => cannot_join(&node, &problem),
        StepFailure::Step {
            error: SlurmError::NodeDown { node, message },
            ..
        } => cannot_join(&node, &message),
        StepFailure::Step { nodes, error } => {
            let nodes = nodes.join(", ");
            Failure::new(
                FailureCode::NotStarted,
                format!("cannot start the agents on {nodes}"),
            )
            .with_source(error)
            .with_hint("run again with -v to see the output of srun and the agents")
        }
    }
}
