//! A simulated runtime: containers follow scripts, on tokio's paused clock.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::{LifecycleHandle, start};
use crate::container_runtime::{
    ContainerExit, ContainerRuntime, ExecResult, ImageProblem, ImageProblemReason, ImagePullPolicy,
    ImageRequest, PodImage, PodNetwork, StartFailure, StartRequest, StartedContainer,
};
use pod_protocol::{Bundle, ContainerInput, NodeFacts, PodState, Problem, Stop};

/// The behaviour of a container in one run.
#[derive(Clone, Debug)]
pub enum ScriptedRun {
    /// Exits by itself after this many seconds, with this code.
    Exits(u64, i32),
    /// Runs until its stop signal, and exits this many seconds later, with this code.
    ExitsOnStop(u64, i32),
    /// Runs until SIGKILL.
    IgnoresStop,
    /// Is OOM-killed.
    OomKilled,
    /// Can't be started, with reason and message.
    StartFails(&'static str, &'static str),
}

/// Returns the duration and the exit code of a command in a container.
type Exec = Box<dyn Fn(&str, &[String]) -> (Duration, i32)>;

struct SimulatedContainer {
    name: String,
    script: ScriptedRun,
    exit: Option<oneshot::Sender<ContainerExit>>,
    timer: Option<AbortHandle>,
}

/// The simulated runtime, and its log.
pub struct SimulatedRuntime {
    started_at: Instant,
    scripts: RefCell<HashMap<String, VecDeque<ScriptedRun>>>,
    /// By id.
    containers: RefCell<HashMap<String, SimulatedContainer>>,
    log: RefCell<Vec<String>>,
    /// Images that are present.
    pub images: RefCell<HashSet<String>>,
    /// Failures of the next pulls: reason and message.
    pub pull_failures: RefCell<VecDeque<(&'static str, &'static str)>>,
    pub pull_time: Cell<Duration>,
    /// Failures of the next setups of the pod: reason and message.
    pub setup_failures: RefCell<VecDeque<(&'static str, &'static str)>>,
    /// The behaviour of commands; by default, they succeed at once.
    pub exec: RefCell<Option<Exec>>,
    last_id: Cell<u64>,
    weak_self: RefCell<std::rc::Weak<Self>>,
}

impl SimulatedRuntime {
    /// A runtime whose containers run until their stop signal.
    pub fn new() -> Rc<Self> {
        let sim = Rc::new(Self {
            started_at: Instant::now(),
            scripts: RefCell::default(),
            containers: RefCell::default(),
            log: RefCell::default(),
            images: RefCell::default(),
            pull_failures: RefCell::default(),
            pull_time: Cell::default(),
            setup_failures: RefCell::default(),
            exec: RefCell::default(),
            last_id: Cell::default(),
            weak_self: RefCell::default(),
        });
        *sim.weak_self.borrow_mut() = Rc::downgrade(&sim);
        sim
    }

    /// Sets the behaviour of a container in its runs; the last one repeats.
    pub fn script(self: &Rc<Self>, name: &str, runs: &[ScriptedRun]) -> Rc<Self> {
        self.scripts
            .borrow_mut()
            .insert(name.to_owned(), runs.iter().cloned().collect());
        self.clone()
    }

    /// Sets the behaviour of commands.
    pub fn exec(self: &Rc<Self>, exec: impl Fn(&str, &[String]) -> (Duration, i32) + 'static) {
        *self.exec.borrow_mut() = Some(Box::new(exec));
    }

    /// Seconds since the test began.
    pub fn now(&self) -> u64 {
        self.started_at.elapsed().as_secs()
    }

    /// All log lines, each with its second in front.
    pub fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    /// The log lines of these calls.
    pub fn log_of(&self, calls: &[&str]) -> Vec<String> {
        self.log()
            .into_iter()
            .filter(|line| {
                let entry = line.split_once(' ').map_or("", |(_, entry)| entry);
                calls.iter().any(|call| entry.starts_with(call))
            })
            .collect()
    }

    fn record(&self, entry: impl std::fmt::Display) {
        self.log
            .borrow_mut()
            .push(format!("{} {entry}", self.now()));
    }

    fn exit(&self, id: &str, code: i32, oom_killed: bool) {
        let mut containers = self.containers.borrow_mut();
        let Some(container) = containers.get_mut(id) else {
            return;
        };
        if let Some(exit) = container.exit.take() {
            if let Some(timer) = container.timer.take() {
                timer.abort();
            }
            self.record(format!("exit {} {code}", container.name));
            let _ = exit.send(ContainerExit {
                code,
                signal: None,
                oom_killed,
                finished_at: Timestamp::now(),
            });
        }
    }

    fn exit_later(&self, id: &str, seconds: u64, code: i32, oom_killed: bool) -> AbortHandle {
        let sim = self.weak_self.borrow().upgrade().expect("a runtime");
        let id = id.to_owned();
        tokio::task::spawn_local(async move {
            sleep(Duration::from_secs(seconds)).await;
            sim.exit(&id, code, oom_killed);
        })
        .abort_handle()
    }
}

impl ContainerRuntime for SimulatedRuntime {
    async fn set_up(&self) -> Result<PodNetwork, Problem> {
        self.record("set up");
        match self.setup_failures.borrow_mut().pop_front() {
            Some((reason, message)) => Err(problem(reason, message)),
            None => Ok(PodNetwork {
                ips: vec![IpAddr::from([10, 0, 0, 7])],
                unsupported_host_ports: Vec::new(),
            }),
        }
    }

    async fn ensure_image(&self, request: &ImageRequest) -> Result<PodImage, ImageProblem> {
        let reference = &request.reference;
        let image = |pulled| PodImage {
            reference: format!("docker.io/library/{reference}"),
            id: format!("docker.io/library/{reference}@sha256:00"),
            size: 42,
            pulled,
            ..Default::default()
        };
        if request.policy != ImagePullPolicy::Always && self.images.borrow().contains(reference) {
            return Ok(image(false));
        }
        if request.policy == ImagePullPolicy::Never {
            return Err(image_problem("ErrImageNeverPull", "not present"));
        }
        self.record(format!("pull {reference}"));
        sleep(self.pull_time.get()).await;
        if let Some((reason, message)) = self.pull_failures.borrow_mut().pop_front() {
            return Err(image_problem(reason, message));
        }
        self.images.borrow_mut().insert(reference.clone());
        Ok(image(true))
    }

    /// Treats volumes with a colon in their name as images.
    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest> {
        let mounts = container.volume_mounts.iter().flatten();
        mounts
            .filter(|mount| mount.name.contains(':'))
            .map(|mount| ImageRequest {
                reference: mount.name.clone(),
                policy: ImagePullPolicy::IfNotPresent,
            })
            .collect()
    }

    async fn start(&self, request: &StartRequest) -> Result<StartedContainer, StartFailure> {
        let name = &request.container.name;
        let runs_already = self
            .containers
            .borrow()
            .values()
            .any(|container| container.exit.is_some() && container.name == *name);
        assert!(!runs_already, "{name} runs already");
        self.record(format!("start {name}#{}", request.attempt));
        let script = {
            let mut scripts = self.scripts.borrow_mut();
            match scripts.get_mut(name) {
                Some(runs) if runs.len() > 1 => runs.pop_front(),
                Some(runs) => runs.front().cloned(),
                None => None,
            }
            .unwrap_or(ScriptedRun::ExitsOnStop(0, 143))
        };
        match script {
            ScriptedRun::StartFails("StartError", message) => {
                return Err(StartFailure::Program(message.to_owned()));
            }
            ScriptedRun::StartFails(reason, message) => {
                return Err(problem(reason, message).into());
            }
            _ => {}
        }
        self.last_id.set(self.last_id.get() + 1);
        let id = format!("{:064x}", self.last_id.get());
        let (sender, exit) = oneshot::channel();
        let lifecycle = request.container.lifecycle.as_ref();
        let stop_signal = lifecycle.and_then(|lifecycle| lifecycle.stop_signal.as_deref());
        let stop_signal = stop_signal.and_then(linux::signal::number_by_name);
        let timer = match &script {
            ScriptedRun::Exits(seconds, code) => Some(self.exit_later(&id, *seconds, *code, false)),
            ScriptedRun::OomKilled => Some(self.exit_later(&id, 1, 137, true)),
            _ => None,
        };
        self.containers.borrow_mut().insert(
            id.clone(),
            SimulatedContainer {
                name: name.clone(),
                script,
                exit: Some(sender),
                timer,
            },
        );
        Ok(StartedContainer {
            id,
            started_at: Timestamp::now(),
            exit,
            stop_signal: stop_signal.unwrap_or(15),
            user: None,
            log_warnings: mpsc::unbounded_channel().1,
        })
    }

    fn signal(&self, id: &str, signal: i32) {
        let (name, script) = {
            let containers = self.containers.borrow();
            let running = containers
                .get(id)
                .filter(|container| container.exit.is_some());
            let Some(container) = running else {
                return;
            };
            (container.name.clone(), container.script.clone())
        };
        self.record(format!("signal {name} {signal}"));
        match (signal, script) {
            (9, _) => self.exit(id, 137, false),
            (_, ScriptedRun::ExitsOnStop(0, code)) => self.exit(id, code, false),
            (_, ScriptedRun::ExitsOnStop(seconds, code)) => {
                self.exit_later(id, seconds, code, false);
            }
            (_, ScriptedRun::Exits(..)) => self.exit(id, 143, false),
            _ => {}
        }
    }

    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem> {
        let name_of = |id| Some(self.containers.borrow().get(id)?.name.clone());
        let name = name_of(id).unwrap_or_default();
        let (duration, code) = match &*self.exec.borrow() {
            Some(exec) => exec(&name, command),
            None => (Duration::ZERO, 0),
        };
        self.record(format!("exec {name} {}", command.join(" ")));
        sleep(duration.min(timeout)).await;
        Ok(ExecResult {
            code: (duration <= timeout).then_some(code),
            output: "output".to_owned(),
        })
    }

    async fn connect(&self, _: IpAddr, _: u16) -> std::io::Result<TcpStream> {
        Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))
    }

    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String> {
        failed.then(|| format!("message of {}", request.container.name))
    }

    async fn tear_down(&self) {
        let running = self
            .containers
            .borrow()
            .values()
            .filter(|container| container.exit.is_some())
            .count();
        assert_eq!(running, 0, "containers still run");
        self.record("tear down");
    }
}

fn image_problem(reason: &str, message: &str) -> ImageProblem {
    ImageProblem {
        reason: ImageProblemReason::parse(reason),
        message: message.to_owned(),
    }
}

fn problem(reason: &str, message: &str) -> Problem {
    Problem {
        reason: reason.to_owned(),
        message: message.to_owned(),
    }
}

/// A bundle with this pod spec. Containers without an image get a default one.
pub fn bundle(mut spec: Value) -> Bundle {
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in spec[list].as_array_mut().into_iter().flatten() {
            if container.get("image").is_none() {
                container["image"] = json!("image:1");
            }
        }
    }
    if spec.get("containers").is_none() {
        spec["containers"] = json!([]);
    }
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "generation": 1},
        "spec": spec,
    }))
    .expect("a pod");
    Bundle {
        pod,
        containers: Default::default(),
        volumes: Default::default(),
        pull_credentials: Vec::new(),
        node: NodeFacts::default(),
        previous_statuses: Vec::new(),
    }
}

/// A pod with a simulated runtime.
pub struct TestPod {
    pub sim: Rc<SimulatedRuntime>,
    pub lifecycle: LifecycleHandle,
    pub bundle: Bundle,
}

impl TestPod {
    /// Starts a pod with this spec.
    pub fn new(sim: &Rc<SimulatedRuntime>, spec: Value) -> Self {
        Self::with_bundle(sim, bundle(spec))
    }

    /// Starts a pod with this bundle.
    pub fn with_bundle(sim: &Rc<SimulatedRuntime>, bundle: Bundle) -> Self {
        let lifecycle = start(sim.clone(), bundle.clone());
        Self {
            sim: sim.clone(),
            lifecycle,
            bundle,
        }
    }

    /// Advances the clock to 100 ms after this second of the test, so that everything due in that second has happened.
    pub async fn advance_to(&self, second: u64) -> PodState {
        sleep_until(self.sim.started_at + Duration::from_secs(second) + Duration::from_millis(100))
            .await;
        self.state()
    }

    pub fn state(&self) -> PodState {
        self.lifecycle.state().borrow().clone()
    }

    /// Stops the pod without waiting for its end.
    pub fn stop(&self, grace_seconds: i64) {
        self.lifecycle.stop(Stop {
            grace_seconds,
            failure: None,
        });
    }

    /// Abandons the pod, and waits until its containers have exited.
    pub async fn abandon(&self) -> bool {
        self.lifecycle.abandon().await
    }

    /// Waits until the pod is finished.
    pub async fn finished(&self) -> PodState {
        self.lifecycle.finished().await;
        self.state()
    }

    /// Changes the bundle and applies it.
    pub fn update(&mut self, change: impl FnOnce(&mut Bundle)) {
        change(&mut self.bundle);
        self.lifecycle.put_bundle(self.bundle.clone());
    }

    /// The status of a container of any type.
    pub fn status(&self, name: &str) -> ContainerStatus {
        let state = self.state();
        [
            state.init_containers,
            state.containers,
            state.ephemeral_containers,
        ]
        .into_iter()
        .flatten()
        .find(|status| status.name == name)
        .expect("a container")
    }

    /// The status of a container, as [`summary()`] formats it.
    pub fn summary(&self, name: &str) -> String {
        summary(&self.status(name))
    }

    /// All events about a container, as `reason: message`.
    pub fn events(&self, name: &str) -> Vec<String> {
        self.state()
            .events
            .into_iter()
            .filter(|event| {
                event
                    .field_path
                    .as_ref()
                    .is_some_and(|path| path.ends_with(&format!("{{{name}}}")))
            })
            .map(|event| format!("{}: {}", event.reason, event.message))
            .collect()
    }
}

/// Formats a status: `running`, `waiting REASON` or `terminated REASON CODE`, then last state, restart count and readiness.
fn summary(status: &ContainerStatus) -> String {
    let state = status.state.clone().unwrap_or_default();
    let mut summary = if state.running.is_some() {
        "running".to_owned()
    } else if let Some(terminated) = &state.terminated {
        format!(
            "terminated {} {}",
            terminated.reason.clone().unwrap_or_default(),
            terminated.exit_code
        )
    } else {
        let reason = state.waiting.and_then(|waiting| waiting.reason);
        format!("waiting {}", reason.unwrap_or_default())
    };
    if let Some(terminated) = status.last_state.clone().unwrap_or_default().terminated {
        summary = format!(
            "{summary} (last {} {})",
            terminated.reason.unwrap_or_default(),
            terminated.exit_code
        );
    }
    if status.restart_count > 0 {
        summary = format!("{summary} r{}", status.restart_count);
    }
    if status.ready {
        summary.push_str(" ready");
    }
    summary
}

/// A container's input with this problem.
pub fn with_problem(reason: &str, message: &str) -> ContainerInput {
    ContainerInput {
        problem: Some(problem(reason, message)),
        ..Default::default()
    }
}
