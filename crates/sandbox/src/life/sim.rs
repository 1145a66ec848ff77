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

use super::{LifeHandle, start};
use crate::seams::{
    ExecResult, Exit, ImageRequest, PodImage, PodNetwork, Runtime, StartRequest, Started,
};
use pod_protocol::{Bundle, ContainerInput, NodeFacts, PodState, Problem, Stop};

/// The behaviour of a container in one run.
#[derive(Clone, Debug)]
pub enum Script {
    /// Exits by itself after this many seconds, with this code.
    Ends(u64, i32),
    /// Runs until its stop signal, and exits this many seconds later, with this code.
    Obeys(u64, i32),
    /// Runs until SIGKILL.
    Stubborn,
    /// Is OOM-killed.
    OutOfMemory,
    /// Can't be started, with reason and message.
    Fails(&'static str, &'static str),
}

/// Returns the duration and the exit code of a command in a container.
type Exec = Box<dyn Fn(&str, &[String]) -> (Duration, i32)>;

struct Live {
    name: String,
    script: Script,
    exit: Option<oneshot::Sender<Exit>>,
    timer: Option<AbortHandle>,
}

/// The simulated runtime, and its log.
pub struct Sim {
    begin: Instant,
    scripts: RefCell<HashMap<String, VecDeque<Script>>>,
    live: RefCell<HashMap<String, Live>>,
    log: RefCell<Vec<String>>,
    /// Images that are present.
    pub present: RefCell<HashSet<String>>,
    /// Failures of the next pulls: reason and message.
    pub pulls: RefCell<VecDeque<(&'static str, &'static str)>>,
    pub pull_time: Cell<Duration>,
    /// Failures of the next setups of the pod: reason and message.
    pub ups: RefCell<VecDeque<(&'static str, &'static str)>>,
    /// The behaviour of commands; by default, they succeed at once.
    pub exec: RefCell<Option<Exec>>,
    next: Cell<u64>,
    itself: RefCell<std::rc::Weak<Self>>,
}

impl Sim {
    /// A runtime whose containers run until their stop signal.
    pub fn new() -> Rc<Self> {
        let sim = Rc::new(Self {
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
        *sim.itself.borrow_mut() = Rc::downgrade(&sim);
        sim
    }

    /// Sets the behaviour of a container in its runs; the last one repeats.
    pub fn script(self: &Rc<Self>, name: &str, runs: &[Script]) -> Rc<Self> {
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
        self.begin.elapsed().as_secs()
    }

    /// All log lines, each with its second in front.
    pub fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    /// The log lines that begin with one of these words after the second.
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
            let _ = exit.send(Exit {
                code,
                signal: None,
                oom_killed,
                at: Timestamp::now(),
            });
        }
    }

    fn end_later(&self, id: &str, after: u64, code: i32, oom: bool) -> AbortHandle {
        let sim = self.itself.borrow().upgrade().expect("the test goes on");
        let id = id.to_owned();
        tokio::task::spawn_local(async move {
            sleep(Duration::from_secs(after)).await;
            sim.end(&id, code, oom);
        })
        .abort_handle()
    }
}

impl Runtime for Sim {
    async fn up(&self) -> Result<PodNetwork, Problem> {
        self.note("up");
        match self.ups.borrow_mut().pop_front() {
            Some((reason, message)) => Err(problem(reason, message)),
            None => Ok(PodNetwork {
                ips: vec![IpAddr::from([10, 0, 0, 7])],
                closed_ports: Vec::new(),
            }),
        }
    }

    async fn image(&self, request: &ImageRequest) -> Result<PodImage, Problem> {
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

    /// Treats volumes with a colon in their name as images.
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

    async fn start(&self, request: &StartRequest) -> Result<Started, Problem> {
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
            .unwrap_or(Script::Obeys(0, 143))
        };
        if let Script::Fails(reason, message) = script {
            return Err(problem(reason, message));
        }
        self.next.set(self.next.get() + 1);
        let id = format!("{:064x}", self.next.get());
        let (sender, exit) = oneshot::channel();
        let lifecycle = request.container.lifecycle.as_ref();
        let stop_signal = lifecycle.and_then(|lifecycle| lifecycle.stop_signal.as_deref());
        let stop_signal = stop_signal.and_then(linux::signal::by_name);
        let timer = match &script {
            Script::Ends(after, code) => Some(self.end_later(&id, *after, *code, false)),
            Script::OutOfMemory => Some(self.end_later(&id, 1, 137, true)),
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
        Ok(Started {
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
            (_, Script::Obeys(0, code)) => self.end(id, code, false),
            (_, Script::Obeys(after, code)) => {
                self.end_later(id, after, code, false);
            }
            (_, Script::Ends(..)) => self.end(id, 143, false),
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

    async fn down(&self) {
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
pub struct World {
    pub sim: Rc<Sim>,
    pub life: LifeHandle,
    pub bundle: Bundle,
}

impl World {
    /// Starts a pod with this spec.
    pub fn new(sim: &Rc<Sim>, spec: Value) -> Self {
        Self::with(sim, bundle(spec))
    }

    /// Starts a pod with this bundle.
    pub fn with(sim: &Rc<Sim>, bundle: Bundle) -> Self {
        let life = start(sim.clone(), bundle.clone());
        Self {
            sim: sim.clone(),
            life,
            bundle,
        }
    }

    /// Advances the clock to 100 ms after this second of the test, so that everything due in that second has happened.
    pub async fn at(&self, second: u64) -> PodState {
        sleep_until(self.sim.begin + Duration::from_secs(second) + Duration::from_millis(100))
            .await;
        self.state()
    }

    pub fn state(&self) -> PodState {
        self.life.state().borrow().clone()
    }

    /// Stops the pod without waiting for its end.
    pub fn stop(&self, grace_seconds: i64) {
        self.life.stop(Stop {
            grace_seconds,
            failure: None,
        });
    }

    /// Abandons the pod, and waits until its containers have exited.
    pub async fn abandon(&self) -> bool {
        self.life.abandon().await
    }

    /// Waits until the pod is finished.
    pub async fn finish(&self) -> PodState {
        self.life.finished().await;
        self.state()
    }

    /// Changes the bundle and sends it.
    pub fn change(&mut self, change: impl FnOnce(&mut Bundle)) {
        change(&mut self.bundle);
        self.life.put_bundle(self.bundle.clone());
    }

    /// The status of a container of any kind.
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

    /// The status of a container, as [`word()`] formats it.
    pub fn word(&self, name: &str) -> String {
        word(&self.status(name))
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

/// Formats a status: `running`, `waiting REASON` or `ended REASON CODE`, then last state, restart count and readiness.
pub fn word(status: &ContainerStatus) -> String {
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

/// A container's input with this problem.
pub fn with_problem(reason: &str, message: &str) -> ContainerInput {
    ContainerInput {
        problem: Some(problem(reason, message)),
        ..Default::default()
    }
}
