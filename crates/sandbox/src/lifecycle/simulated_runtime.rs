//! A simulated runtime: containers that do what a script says, on tokio's paused clock.

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
use crate::container_runtime::{ContainerExit, ContainerRuntime, ExecResult, ImageRequest, PodImage, PodNetwork, StartRequest, StartedContainer};
use pod_protocol::{Bundle, ContainerInput, NodeFacts, PodState, Problem, Stop};

/// What a container does when it is started.
#[derive(Clone, Debug)]
pub enum Script {
    /// Exits by itself after so many seconds with this code.
    Exits(u64, i32),
    /// Runs until it is told to end; then needs so many seconds, and ends with this code.
    StopsOnSignal(u64, i32),
    /// Runs until it is killed.
    IgnoresSignals,
    /// Exits for want of memory.
    OomKilled,
    /// Can't be started.
    FailsToStart(&'static str, &'static str),
}

/// What a command in a container does: how long it takes, its exit code and its output.
type Exec = Box<dyn Fn(&str, &[String]) -> (Duration, i32)>;

struct Live {
    name: String,
    script: Script,
    exit: Option<oneshot::Sender<ContainerExit>>,
    timer: Option<AbortHandle>,
}

/// The runtime, and the test around it.
pub struct SimulatedRuntime {
    begin: Instant,
    scripts: RefCell<HashMap<String, VecDeque<Script>>>,
    live: RefCell<HashMap<String, Live>>,
    log: RefCell<Vec<String>>,
    /// Images that need not be pulled.
    pub present: RefCell<HashSet<String>>,
    /// Pulls that fail, with reason and message.
    pub pulls: RefCell<VecDeque<(&'static str, &'static str)>>,
    /// How long a pull takes.
    pub pull_time: Cell<Duration>,
    /// Tries to come up that fail.
    pub ups: RefCell<VecDeque<(&'static str, &'static str)>>,
    /// What commands do; without it, they succeed at once.
    pub exec: RefCell<Option<Exec>>,
    next: Cell<u64>,
    itself: RefCell<std::rc::Weak<Self>>,
}

impl SimulatedRuntime {
    /// A runtime whose containers run until told to end.
    pub fn new() -> Rc<Self> {
        let runtime = Rc::new(Self {
            begin: Instant::now(),
            scripts: RefCell::default(),
            live: RefCell::default(),
            log: RefCell::default(),
            present: RefCell::default(),
            pulls: RefCell::default(),
            pull_time: Cell::default(),
            ups: RefCell::default(),
            exec: RefCell::default(),
            next: Cell::default(),
            itself: RefCell::default(),
        });
        *runtime.itself.borrow_mut() = Rc::downgrade(&runtime);
        runtime
    }

    /// What a container does in its runs; the last goes on for ever.
    pub fn script(self: &Rc<Self>, name: &str, runs: &[Script]) -> Rc<Self> {
        self.scripts
            .borrow_mut()
            .insert(name.to_owned(), runs.iter().cloned().collect());
        self.clone()
    }

    /// What commands do.
    pub fn exec(self: &Rc<Self>, exec: impl Fn(&str, &[String]) -> (Duration, i32) + 'static) {
        *self.exec.borrow_mut() = Some(Box::new(exec));
    }

    /// Seconds since the test began.
    pub fn now(&self) -> u64 {
        self.begin.elapsed().as_secs()
    }

    /// What happened so far, each with its second.
    pub fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    /// What of it begins with one of these words.
    pub fn log_of(&self, words: &[&str]) -> Vec<String> {
        self.log()
            .into_iter()
            .filter(|line| {
                let what = line.split_once(' ').map_or("", |(_, what)| what);
                words.iter().any(|word| what.starts_with(word))
            })
            .collect()
    }

    fn note(&self, what: impl std::fmt::Display) {
        self.log.borrow_mut().push(format!("{} {what}", self.now()));
    }

    fn end(&self, id: &str, code: i32, oom_killed: bool) {
        let mut live = self.live.borrow_mut();
        let Some(live) = live.get_mut(id) else { return };
        if let Some(exit) = live.exit.take() {
            if let Some(timer) = live.timer.take() {
                timer.abort();
            }
            self.log
                .borrow_mut()
                .push(format!("{} exit {} {code}", self.now(), live.name));
            let _ = exit.send(ContainerExit {
                code,
                signal: None,
                oom_killed,
                at: Timestamp::now(),
            });
        }
    }

    fn end_later(&self, id: &str, after: u64, code: i32, oom: bool) -> AbortHandle {
        let runtime = self.itself.borrow().upgrade().expect("the test goes on");
        let id = id.to_owned();
        tokio::task::spawn_local(async move {
            sleep(Duration::from_secs(after)).await;
            runtime.end(&id, code, oom);
        })
        .abort_handle()
    }
}

impl ContainerRuntime for SimulatedRuntime {
    async fn set_up(&self) -> Result<PodNetwork, Problem> {
        self.note("up");
        match self.ups.borrow_mut().pop_front() {
            Some((reason, message)) => Err(problem(reason, message)),
            None => Ok(PodNetwork {
                ips: vec![IpAddr::from([10, 0, 0, 7])],
                unsupported_host_ports: Vec::new(),
            }),
        }
    }

    async fn ensure_image(&self, request: &ImageRequest) -> Result<PodImage, Problem> {
        let reference = &request.reference;
        let image = |pulled| PodImage {
            reference: format!("docker.io/library/{reference}"),
            id: format!("docker.io/library/{reference}@sha256:00"),
            size: 42,
            pulled,
            ..Default::default()
        };
        if request.policy != "Always" && self.present.borrow().contains(reference) {
            return Ok(image(false));
        }
        if request.policy == "Never" {
            return Err(problem("ErrImageNeverPull", "it is not there"));
        }
        self.note(format!("pull {reference}"));
        sleep(self.pull_time.get()).await;
        if let Some((reason, message)) = self.pulls.borrow_mut().pop_front() {
            return Err(problem(reason, message));
        }
        self.present.borrow_mut().insert(reference.clone());
        Ok(image(true))
    }

    /// Volumes whose names have a colon are images.
    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest> {
        let mounts = container.volume_mounts.iter().flatten();
        mounts
            .filter(|mount| mount.name.contains(':'))
            .map(|mount| ImageRequest {
                reference: mount.name.clone(),
                policy: "IfNotPresent".to_owned(),
            })
            .collect()
    }

    async fn start(&self, request: &StartRequest) -> Result<StartedContainer, Problem> {
        let name = &request.container.name;
        let twice = self
            .live
            .borrow()
            .values()
            .any(|live| live.exit.is_some() && live.name == *name);
        assert!(!twice, "{name} runs already");
        self.note(format!("start {name}#{}", request.attempt));
        let script = {
            let mut scripts = self.scripts.borrow_mut();
            match scripts.get_mut(name) {
                Some(runs) if runs.len() > 1 => runs.pop_front(),
                Some(runs) => runs.front().cloned(),
                None => None,
            }
            .unwrap_or(Script::StopsOnSignal(0, 143))
        };
        if let Script::FailsToStart(reason, message) = script {
            return Err(problem(reason, message));
        }
        self.next.set(self.next.get() + 1);
        let id = format!("{:064x}", self.next.get());
        let (sender, exit) = oneshot::channel();
        let lifecycle = request.container.lifecycle.as_ref();
        let stop_signal = lifecycle.and_then(|lifecycle| lifecycle.stop_signal.as_deref());
        let stop_signal = stop_signal.and_then(linux::signal::by_name);
        let timer = match &script {
            Script::Exits(after, code) => Some(self.end_later(&id, *after, *code, false)),
            Script::OomKilled => Some(self.end_later(&id, 1, 137, true)),
            _ => None,
        };
        self.live.borrow_mut().insert(
            id.clone(),
            Live {
                name: name.clone(),
                script,
                exit: Some(sender),
                timer,
            },
        );
        Ok(StartedContainer {
            id,
            at: Timestamp::now(),
            exit,
            stop_signal: stop_signal.unwrap_or(15),
            user: None,
            log_warnings: mpsc::unbounded_channel().1,
        })
    }

    fn signal(&self, id: &str, signal: i32) {
        let (name, script) = {
            let live = self.live.borrow();
            let Some(live) = live.get(id).filter(|live| live.exit.is_some()) else {
                return;
            };
            (live.name.clone(), live.script.clone())
        };
        self.note(format!("signal {name} {signal}"));
        match (signal, script) {
            (9, _) => self.end(id, 137, false),
            (_, Script::StopsOnSignal(0, code)) => self.end(id, code, false),
            (_, Script::StopsOnSignal(after, code)) => {
                self.end_later(id, after, code, false);
            }
            (_, Script::Exits(..)) => self.end(id, 143, false),
            _ => {}
        }
    }

    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem> {
        let name = self.live.borrow().get(id).map(|live| live.name.clone());
        let name = name.unwrap_or_default();
        let (takes, code) = match &*self.exec.borrow() {
            Some(exec) => exec(&name, command),
            None => (Duration::ZERO, 0),
        };
        self.note(format!("exec {name} {}", command.join(" ")));
        sleep(takes.min(timeout)).await;
        Ok(ExecResult {
            code: (takes <= timeout).then_some(code),
            output: "what it said".to_owned(),
        })
    }

    async fn connect(&self, _: IpAddr, _: u16) -> std::io::Result<TcpStream> {
        Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))
    }

    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String> {
        failed.then(|| format!("last words of {}", request.container.name))
    }

    async fn tear_down(&self) {
        let left = self
            .live
            .borrow()
            .values()
            .filter(|live| live.exit.is_some())
            .count();
        assert_eq!(left, 0, "containers were left running");
        self.note("down");
    }
}

fn problem(reason: &str, message: &str) -> Problem {
    Problem {
        reason: reason.to_owned(),
        message: message.to_owned(),
    }
}

/// A pod of this spec. Containers without an image get one that is there.
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

/// A pod that lives in a simulated pod.
pub struct TestPod {
    pub runtime: Rc<SimulatedRuntime>,
    pub life: LifecycleHandle,
    pub bundle: Bundle,
}

impl TestPod {
    /// Begins.
    pub fn new(runtime: &Rc<SimulatedRuntime>, spec: Value) -> Self {
        Self::with(runtime, bundle(spec))
    }

    /// Begins with a whole bundle.
    pub fn with(runtime: &Rc<SimulatedRuntime>, bundle: Bundle) -> Self {
        let life = start(runtime.clone(), bundle.clone());
        Self {
            runtime: runtime.clone(),
            life,
            bundle,
        }
    }

    /// Lets time pass until so many seconds after the beginning, and a little more, so that what happens then has.
    pub async fn at(&self, second: u64) -> PodState {
        sleep_until(self.runtime.begin + Duration::from_secs(second) + Duration::from_millis(100))
            .await;
        self.state()
    }

    pub fn state(&self) -> PodState {
        self.life.state().borrow().clone()
    }

    /// Exits the pod and waits for it.
    pub fn stop(&self, grace_seconds: i64) {
        self.life.stop(Stop {
            grace_seconds,
            failure: None,
        });
    }

    /// Has the sandbox give up, and waits for that.
    pub async fn abandon(&self) -> bool {
        self.life.abandon().await
    }

    /// Waits for the end.
    pub async fn finish(&self) -> PodState {
        self.life.finished().await;
        self.state()
    }

    /// Changes the pod.
    pub fn change(&mut self, change: impl FnOnce(&mut Bundle)) {
        change(&mut self.bundle);
        self.life.put_bundle(self.bundle.clone());
    }

    /// A container's status, of whatever kind.
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

    /// The container's state in a word or two, its last state, and its restarts.
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

/// A status in a few words: `running`, `waiting REASON`, `ended REASON CODE`, with last state and restarts.
pub fn summary(status: &ContainerStatus) -> String {
    let state = status.state.clone().unwrap_or_default();
    let mut word = if state.running.is_some() {
        "running".to_owned()
    } else if let Some(end) = &state.terminated {
        format!(
            "ended {} {}",
            end.reason.clone().unwrap_or_default(),
            end.exit_code
        )
    } else {
        let reason = state.waiting.and_then(|waiting| waiting.reason);
        format!("waiting {}", reason.unwrap_or_default())
    };
    if let Some(end) = status.last_state.clone().unwrap_or_default().terminated {
        word = format!(
            "{word} (last {} {})",
            end.reason.unwrap_or_default(),
            end.exit_code
        );
    }
    if status.restart_count > 0 {
        word = format!("{word} r{}", status.restart_count);
    }
    if status.ready {
        word.push_str(" ready");
    }
    word
}

/// What a bundle says about a container.
pub fn with_problem(reason: &str, message: &str) -> ContainerInput {
    ContainerInput {
        problem: Some(problem(reason, message)),
        ..Default::default()
    }
}
