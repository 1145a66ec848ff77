//! One cluster as its leader holds it: the control plane, the door for its nodes, and the steps in
//! which their agents run.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use control_plane::components::{address_range, first_service_address};
use control_plane::port::{ReservedPort, find_free_port};
use control_plane::{ClusterConfig, ClusterPki, ControlPlaneEvent};
use slurm::{Allocation, JobDetail, Slurm, SlurmError};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::agents::{Starter, Step, StepFailure};
use super::control_plane::ControlPlane;
use super::grace::Grace;
use super::join::{Common, Door, NodeEvent};
use super::metrics::{self, Metrics};
use super::objects;
use super::plan::plans;
use super::storage::{self, Owner, Storage};
use crate::carried;
use crate::cli::RunOptions;
use crate::exit::{Code, Failure};
use crate::kubernetes::Release;
use crate::progress::Progress;
use crate::say::say;

/// The range out of which KSI hands a port to the workload: Kubernetes' node ports.
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30000..=32767;
/// Certificates of a job without a time limit.
const LONGEST_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
/// Certificates outlive the job by this, for clocks that differ.
const EXTRA_LIFE: Duration = Duration::from_secs(24 * 3600);
/// A lost agent is started again after this.
const RESTART_PAUSE: Duration = Duration::from_secs(2);
/// … and later each time, up to this.
const MAX_RESTART_PAUSE: Duration = Duration::from_secs(60);

/// How a cluster that had started came to its end by itself.
#[derive(Debug)]
pub enum Ended {
    /// Slurm told the agents to end: the time limit, or a cancelled job.
    BySlurm,
    /// It broke.
    Broken(Failure),
}

/// One thing that happened.
enum Happening {
    ControlPlane(Result<ControlPlaneEvent, Failure>),
    Node(String, NodeEvent),
    Step(StepFailure),
    /// It is time to start this node's agent again.
    Restart(String),
}

/// A cluster.
pub struct Cluster {
    /// Its name.
    pub name: String,
    /// What its workload's processes carry in their environment, so that they can be found.
    pub mark: String,
    /// An administrator's token, for scripts that speak to the API themselves.
    pub token: String,
    /// The port that scripts may use for a service.
    pub node_port: u16,
    /// The URL of its API.
    pub api: String,
    /// An administrator's client.
    pub client: kube::Client,
    /// What its parts get to end by themselves.
    pub grace: Grace,
    control_plane: ControlPlane,
    verbose: bool,
    seeded: bool,
    pki: Arc<ClusterPki>,
    door: Arc<Door>,
    starter: Starter,
    slurm: Slurm,
    owner: Owner,
    leaders: Vec<SocketAddr>,
    steps: Vec<Step>,
    node_events: mpsc::UnboundedReceiver<(String, NodeEvent)>,
    step_failures: mpsc::UnboundedReceiver<StepFailure>,
    waiting_for: BTreeSet<String>,
    /// Nodes that were lost and did not come back, with how often their agents were started again.
    lost: HashMap<String, u32>,
    /// Those of them for which a new agent is about to be started.
    restarting: BTreeSet<String>,
    storage: Option<Storage>,
    metrics: Option<Metrics>,
    restarts: (
        mpsc::UnboundedSender<String>,
        mpsc::UnboundedReceiver<String>,
    ),
    _api_port: ReservedPort,
}

impl Cluster {
    /// Starts everything at once; nothing has answered yet when this returns.
    pub async fn launch(
        options: &RunOptions,
        allocation: &Allocation,
        release: &Release,
        seed: Option<std::path::PathBuf>,
        slurm: Slurm,
    ) -> anyhow::Result<Self> {
        let seeded = seed.is_some();
        // Two clusters in one job have different names, and can't be mistaken for each other's kubeconfig.
        let random = crate::token::new()?;
        let name = format!("coracle-{}-{}", allocation.job_id, &random[..4]);
        let mark = format!("{name}-{}", &random[4..20]);
        let addresses = linux::address::host_addresses()?;
        let advertised = *addresses.first().ok_or_else(|| {
            Failure::new(Code::Host, "this host has no network address but loopback")
                .hint("a cluster of one node needs one too: check `ip addr`")
        })?;
        if advertised.is_ipv6() {
            return Err(Failure::new(
                Code::Host,
                format!("this host has no IPv4 address, only {advertised}"),
            )
            .hint("pods and services have IPv4 addresses, so the nodes need them too: check `ip -4 addr`")
            .into());
        }
        refuse_our_own_network(&addresses, options)?;
        let api_port = reserve(options.api_port)?;
        let (detail, kill_wait) =
            tokio::join!(slurm.job_detail(allocation.job_id), slurm.kill_wait());
        let detail = detail.map_err(Failure::from)?;
        // Where it can't be known, the usual is likely.
        let grace = Grace::within(kill_wait.ok().flatten());
        let pki = Arc::new(ClusterPki::new(lifetime(&detail))?);
        let admin = pki.administrator()?;
        let api = SocketAddr::new(advertised, api_port.number());
        let token = crate::token::new()?;
        let mut files = pki.files(api_names(&addresses, &options.service_cidr))?;
        files.insert(
            "tokens.csv".into(),
            format!("{token},admin-user,1,system:masters\n"),
        );
        let url = format!("https://{api}");
        let ca = pki.cluster.cert_pem();
        let config = ClusterConfig {
            name: name.clone(),
            release: release.dir.clone(),
            addresses: addresses.clone(),
            api_port: api_port.number(),
            service_cidr: options.service_cidr.clone(),
            pod_cidr: options.pod_cidr.clone(),
            seed,
            workload: carried::workload().map(|(dir, _)| dir),
            lowers_gogc: release.is_our_build(),
            log_dir: options.logs.as_deref().map(make_log_dir).transpose()?,
            verbose: options.verbose,
            files,
            admin_kubeconfig: control_plane::kubeconfig::kubeconfig(&name, &url, ca, &admin),
        };
        let control_plane = ControlPlane::start(config).await?;

        let listener = TcpListener::bind("0.0.0.0:0")
            .await
            .context("cannot open the door")?;
        let door_port = listener.local_addr()?.port();
        let (tell_node, node_events) = mpsc::unbounded_channel();
        let (tell_step, step_failures) = mpsc::unbounded_channel();
        let common = Common {
            pki: pki.clone(),
            api_port: api_port.number(),
            kubernetes_version: release.version.clone(),
            job: (allocation.job_id, allocation.step_id),
            mark: mark.clone(),
            secret: crate::token::new()?,
            pods_grace: grace.pods(),
            pods_as_steps: options.pods_as_steps,
        };
        let plans = plans(allocation, &detail, &name, &options.pod_cidr)?;
        let door = Door::new(common, plans, tell_node)?;
        tokio::spawn(door.clone().serve(listener));
        let leaders: Vec<_> = addresses
            .iter()
            .map(|address| SocketAddr::new(*address, door_port))
            .collect();
        let starter = Starter::new(slurm.clone(), allocation.job_id, options.verbose, tell_step)?;
        let nodes = allocation.nodes.clone();
        let handover = door.handover(&nodes, leaders.clone())?;
        let step = starter.start(nodes.clone(), &handover)?;

        Ok(Self {
            client: crate::client::connect(api, ca, &admin).await?,
            slurm,
            owner: Owner {
                slurm: allocation.cluster.clone().unwrap_or_default(),
                job: allocation.job_id,
                cluster: name.clone(),
            },
            name,
            mark,
            token,
            node_port: node_port()?,
            api: url,
            grace,
            control_plane,
            verbose: options.verbose,
            seeded,
            pki,
            door,
            starter,
            leaders,
            steps: vec![step],
            node_events,
            step_failures,
            waiting_for: nodes.into_iter().collect(),
            lost: HashMap::new(),
            restarting: BTreeSet::new(),
            restarts: mpsc::unbounded_channel(),
            storage: None,
            metrics: None,
            _api_port: api_port,
        })
    }

    /// Waits until all nodes are Ready, Pods could be created and, if wanted, the controllers of Jobs and the like run.
    pub async fn until_ready(
        &mut self,
        patience: Duration,
        controllers: bool,
        progress: &mut Progress,
    ) -> anyhow::Result<()> {
        let total = self.waiting_for.len();
        progress.phase("control plane answers");
        match tokio::time::timeout(patience, self.settle(controllers, progress)).await {
            Ok(result) => result?,
            Err(_) => return Err(self.too_slow(patience).into()),
        }
        self.storage = storage::start(self.client.clone(), self.slurm.clone(), self.owner.clone());
        self.metrics = self.serve_metrics().await;
        progress.ready(&format!(
            "cluster {} with {} is ready",
            self.name,
            nodes(total)
        ));
        Ok(())
    }

    async fn settle(&mut self, controllers: bool, progress: &mut Progress) -> anyhow::Result<()> {
        let total = self.waiting_for.len();
        let mut answers = false;
        while !(answers && self.waiting_for.is_empty()) {
            match self.next().await {
                Happening::ControlPlane(event) => {
                    let event = event.map_err(|failure| failure.with_code(Code::NotStarted))?;
                    if event == ControlPlaneEvent::ApiServerResponds {
                        answers = true;
                        progress.phase(format!("{} Ready", nodes_are(total)));
                    }
                    self.show(&event);
                }
                Happening::Node(node, NodeEvent::Failed(problem)) => {
                    return Err(not_started(&node, &problem).into());
                }
                Happening::Node(_, NodeEvent::ToldToEnd) => return Err(cancelled().into()),
                Happening::Node(node, event) => self.note(&node, &event),
                Happening::Step(failure) => return Err(step_failed(failure).into()),
                Happening::Restart(node) => self.start_again(node),
            }
        }
        progress.phase("service accounts are there");
        if !self.seeded {
            objects::add_standing(&self.client).await?;
        }
        objects::settle(&self.client, self.pki.cluster.cert_pem()).await?;
        if controllers {
            progress.phase("controllers run");
            objects::controllers(&self.client).await;
        }
        Ok(())
    }

    /// A cluster without figures is still one.
    async fn serve_metrics(&self) -> Option<Metrics> {
        let host = self.leaders.first()?.ip();
        match metrics::start(self.client.clone(), &self.pki, host).await {
            Ok(metrics) => Some(metrics),
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "metrics.k8s.io is not served");
                None
            }
        }
    }

    /// Keeps the cluster whole while the workload runs; returns only when it can't.
    pub async fn watch(&mut self) -> Ended {
        loop {
            match self.next().await {
                Happening::ControlPlane(Ok(event)) => self.show(&event),
                Happening::ControlPlane(Err(failure)) => {
                    return Ended::Broken(failure.with_code(Code::Broken));
                }
                Happening::Node(_, NodeEvent::ToldToEnd) => return Ended::BySlurm,
                Happening::Node(node, event) => self.note(&node, &event),
                Happening::Step(StepFailure::Agent { node, problem }) => {
                    // It may have been one too many.
                    if !self.door.inside().contains(&node) {
                        self.lose(&node, &problem);
                    }
                }
                Happening::Step(StepFailure::Step { nodes, error }) => {
                    let inside = self.door.inside();
                    for node in nodes.iter().filter(|node| !inside.contains(*node)) {
                        self.lose(node, &error.to_string());
                    }
                }
                Happening::Restart(node) => self.start_again(node),
            }
        }
    }

    /// The next thing that happens anywhere in the cluster. Nothing is lost when it is not awaited to
    /// the end.
    async fn next(&mut self) -> Happening {
        tokio::select! {
            event = self.control_plane.next() => Happening::ControlPlane(event),
            Some((node, event)) = self.node_events.recv() => Happening::Node(node, event),
            Some(failure) = self.step_failures.recv() => Happening::Step(failure),
            Some(node) = self.restarts.1.recv() => Happening::Restart(node),
        }
    }

    /// Ends everything in order: nodes first, while the API server is there to take their Nodes away.
    pub async fn stop(mut self) {
        self.metrics = None;
        self.door.end();
        let farewell = async {
            while !self.door.inside().is_empty() {
                if self.node_events.recv().await.is_none() {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(self.grace.nodes, farewell).await;
        if let Some(storage) = self.storage.take() {
            storage.end(self.grace.nodes / 3).await;
        }
        let steps = std::mem::take(&mut self.steps);
        let steps_end = futures::future::join_all(steps.into_iter().map(Step::finish));
        let patience = self.grace.control_plane;
        tokio::join!(steps_end, self.control_plane.stop(patience));
    }

    /// The control plane's files.
    pub fn files(&self) -> anyhow::Result<control_plane::dir::ControlPlaneDirOfPid> {
        self.control_plane
            .files()
            .context("the control plane is not up")
    }

    fn note(&mut self, node: &str, event: &NodeEvent) {
        match event {
            NodeEvent::Registered => {
                self.waiting_for.remove(node);
                if self.lost.remove(node).is_some() {
                    say(format_args!("coracle: node {node} is back"));
                }
                let joined = self.door.inside();
                for step in &mut self.steps {
                    step.outlive_srun(&joined);
                }
            }
            NodeEvent::Lost => self.lose(node, "its agent or its host died"),
            NodeEvent::Failed(problem) => self.lose(node, problem),
            NodeEvent::Joined | NodeEvent::ToldToEnd | NodeEvent::Gone => {}
        }
    }

    /// A node is gone: say so in the cluster at once, and start its agent again in a while.
    fn lose(&mut self, node: &str, problem: &str) {
        if !self.restarting.insert(node.to_owned()) {
            return; // Known, and being seen to.
        }
        self.waiting_for.insert(node.to_owned());
        let times = self.lost.entry(node.to_owned()).or_default();
        *times += 1;
        let pause = RESTART_PAUSE.saturating_mul(*times).min(MAX_RESTART_PAUSE);
        say(format_args!(
            "coracle: node {node} is lost: {problem}; its agent is started again in {} s",
            pause.as_secs()
        ));
        let (client, again) = (self.client.clone(), self.restarts.0.clone());
        let (node, problem) = (node.to_owned(), problem.to_owned());
        tokio::spawn(async move {
            objects::mark_not_ready(&client, &node, &problem).await;
            tokio::time::sleep(pause).await;
            let _ = again.send(node);
        });
    }

    fn start_again(&mut self, node: String) {
        self.restarting.remove(&node);
        if self.door.inside().contains(&node) {
            return; // The agent's own guard was quicker.
        }
        let nodes = vec![node.clone()];
        let started = self
            .door
            .handover(&nodes, self.leaders.clone())
            .and_then(|handover| self.starter.start(nodes, &handover));
        match started {
            Ok(step) => self.steps.push(step),
            Err(error) => tracing::warn!(node, %error, "cannot start the agent again"),
        }
    }

    fn show(&self, event: &ControlPlaneEvent) {
        match event {
            // All that was carried here is in the control plane's own place by now.
            ControlPlaneEvent::Started { .. } => carried::remove(),
            ControlPlaneEvent::Log { component, line } if self.verbose => {
                say(format_args!("coracle: [{component}] {line}"));
            }
            ControlPlaneEvent::LogWriteFailed { component, reason } => say(format_args!(
                "coracle: warning: the log of {component} can't be written: {reason}"
            )),
            ControlPlaneEvent::Exited { component, status } => {
                say(format_args!(
                    "coracle: {component} ended with {status}; it is started again"
                ));
            }
            _ => {}
        }
    }

    fn too_slow(&self, patience: Duration) -> Failure {
        let missing: Vec<&str> = self.waiting_for.iter().map(String::as_str).collect();
        let what = if missing.is_empty() {
            "the API server is not complete".to_owned()
        } else {
            format!("these nodes did not join: {}", missing.join(", "))
        };
        Failure::new(
            Code::NotStarted,
            format!("the cluster did not start within {} s: {what}", patience.as_secs()),
        )
        .hint("`scontrol show node` tells whether they are up; --start-timeout allows more time, -v shows more")
    }
}

fn nodes(count: usize) -> String {
    format!("{count} node{}", if count == 1 { "" } else { "s" })
}

fn nodes_are(count: usize) -> String {
    format!("{} {}", nodes(count), if count == 1 { "is" } else { "are" })
}

/// A pod or service with an address of the host's own network could never be told from a host.
fn refuse_our_own_network(addresses: &[IpAddr], options: &RunOptions) -> Result<(), Failure> {
    for (option, cidr) in [
        ("--pod-cidr", &options.pod_cidr),
        ("--service-cidr", &options.service_cidr),
    ] {
        let Some(network) = address_range(cidr) else {
            continue;
        };
        let ours = |address: &&IpAddr| matches!(address, IpAddr::V4(v4) if network.contains(v4));
        if let Some(address) = addresses.iter().find(ours) {
            let message = format!("{option} {cidr} holds {address}, an address of this host");
            return Err(Failure::new(Code::Usage, message).hint(format!(
                "choose a network that the site doesn't use, with {option}"
            )));
        }
    }
    Ok(())
}

fn reserve(port: u16) -> Result<ReservedPort, Failure> {
    ReservedPort::new(port).map_err(|error| {
        Failure::new(
            Code::Host,
            format!("cannot use port {port} for the API server"),
        )
        .because(error)
        .hint("leave --api-port out, and a free one is chosen")
    })
}

fn make_log_dir(dir: &std::path::Path) -> Result<std::path::PathBuf, Failure> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |error| {
        Failure::new(
            Code::CannotWrite,
            format!("cannot make the log directory {}", dir.display()),
        )
        .because(error)
        .hint("choose a directory that you may write to, with room in it")
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

fn api_names(addresses: &[std::net::IpAddr], service_cidr: &str) -> Vec<String> {
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

fn lifetime(detail: &JobDetail) -> Duration {
    let now = crate::handover::now();
    match detail.end_time {
        Some(end) if end > now => Duration::from_secs(end - now) + EXTRA_LIFE,
        _ => LONGEST_LIFE,
    }
}

fn node_port() -> anyhow::Result<u16> {
    if let Some(port) = std::env::var("K8S_PORT")
        .ok()
        .and_then(|port| port.parse().ok())
    {
        return Ok(port);
    }
    find_free_port(NODE_PORTS).context("no node port is free")
}

fn not_started(node: &str, problem: &str) -> Failure {
    Failure::new(
        Code::NotStarted,
        format!("node {node} cannot join: {problem}"),
    )
    .hint("leave the node out with --exclude, or tell the site's support")
}

fn cancelled() -> Failure {
    Failure::new(
        Code::NotStarted,
        "Slurm ended the job while the cluster was starting",
    )
    .hint("`sacct -j JOB` says why: its time limit, or somebody's scancel")
}

fn step_failed(failure: StepFailure) -> Failure {
    match failure {
        StepFailure::Agent { node, problem } => not_started(&node, &problem),
        StepFailure::Step {
            error: SlurmError::NodeDown { node, message },
            ..
        } => not_started(&node, &message),
        StepFailure::Step { nodes, error } => {
            let nodes = nodes.join(", ");
            Failure::new(
                Code::NotStarted,
                format!("cannot start the agents on {nodes}"),
            )
            .because(error)
            .hint("run again with -v to see what srun and the agents say")
        }
    }
}
