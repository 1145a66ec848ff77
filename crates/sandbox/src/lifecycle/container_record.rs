//! What is known about one container of the pod.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, ContainerUser,
    EphemeralContainer, ResourceRequirements,
};
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::back_off::BackOff;
use super::restart::{self, RestartPolicy};
use crate::container_runtime::PodImage;
use pod_protocol::Problem;

/// Which part a container plays in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerType {
    /// Runs to its end before the next is started.
    Init,
    /// An init container that stays: it has to be up before the next is started, and ends last.
    Sidecar,
    /// What the pod is there for.
    Regular,
    /// Added to a running pod to look at it; never restarted.
    Ephemeral,
}

/// One container: what is wanted of it, and all that happened to it.
#[derive(Clone, Debug)]
pub struct ContainerRecord {
    /// Its part in the pod.
    pub kind: ContainerType,
    /// What the newest bundle says.
    pub spec: Container,
    /// For an ephemeral container: whose processes it wants to see.
    pub target: Option<String>,
    /// What happens with it now; nothing if it isn't running and isn't being started.
    pub run: Option<ContainerRun>,
    /// The end of the newest run, while no newer one has come so far as to have a container.
    pub ended: Option<TerminatedRun>,
    /// The end of the run before.
    pub previous: Option<ContainerStateTerminated>,
    /// The id of the newest container.
    pub id: Option<String>,
    /// The image of the newest container.
    pub image: Option<PodImage>,
    /// Who the first process of the newest container is.
    pub user: Option<ContainerUser>,
    /// The number of the newest run, counted from 0.
    pub restarts: i32,
    /// There was a run with that number.
    pub has_run: bool,
    /// Why it isn't running, if that is known.
    pub waiting: Option<Problem>,
    /// Its last pull failed.
    pub pull_failure: Option<PullFailure>,
    /// The delay between restarts.
    pub back_off: BackOff,
    /// The delay between pulls.
    pub pull_back_off: BackOff,
    /// Not to be started before this, since the last try did not get as far as a container.
    pub retry: Option<Instant>,
    /// What only the API server knows is missing; tried again when a bundle brings it.
    pub blocked: bool,
    /// A sidecar that was up once; it no longer holds up those after it.
    pub started_once: bool,
}

/// A container that is running or being started.
#[derive(Clone, Debug)]
pub struct ContainerRun {
    /// Tells runs apart over the whole life of the pod.
    pub serial: u64,
    /// The image that the spec named.
    pub image: String,
    /// The resources that it was started with.
    pub resources: Option<ResourceRequirements>,
    /// How far it is.
    pub stage: RunStage,
    /// Its container, until the record has taken it over.
    pub container: Option<(String, PodImage, Option<ContainerUser>)>,
    /// It is to end.
    pub kill: Option<KillOrder>,
    /// The startup probe has said that it is up (`true`) or never will be.
    pub startup: Option<bool>,
    /// The liveness probe has given up on it.
    pub liveness_failed: bool,
    /// The readiness probe finds it ready.
    pub ready: bool,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStage {
    /// Its image is looked for, or its processes are being made.
    Preparing,
    /// It runs, but its postStart hook has not finished.
    Hook {
        /// Since when.
        at: Timestamp,
    },
    /// It runs.
    Running {
        /// Since when.
        at: Timestamp,
    },
}

/// The order to end a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillOrder {
    /// When patience ends.
    pub deadline: Instant,
    /// It may be signalled: those that must end before it have.
    pub may_signal: bool,
    /// It is started again whatever its policy says.
    pub restart: bool,
}

/// A run that has ended.
#[derive(Clone, Debug)]
pub struct TerminatedRun {
    /// How, as the API shows it.
    pub state: ContainerStateTerminated,
    /// When, on our own clock.
    pub at: Instant,
    /// It is started again whatever its policy says.
    pub restart: bool,
    /// It was in an earlier life of the pod: init containers have to run again.
    pub before_restart: bool,
}

/// A pull that failed.
#[derive(Clone, Debug)]
pub struct PullFailure {
    /// Of which image.
    pub image: String,
    /// Why, with the reason in front.
    pub message: String,
    /// When.
    pub at: Instant,
    /// The container's state says that it is being waited.
    pub shown: bool,
}

impl ContainerRecord {
    /// A container that nothing is known of.
    pub fn new(kind: ContainerType, spec: Container, target: Option<String>) -> Self {
        Self {
            kind,
            spec,
            target,
            run: None,
            ended: None,
            previous: None,
            id: None,
            image: None,
            user: None,
            restarts: 0,
            has_run: false,
            waiting: None,
            pull_failure: None,
            back_off: BackOff::default(),
            pull_back_off: BackOff::default(),
            retry: None,
            blocked: false,
            started_once: false,
        }
    }

    /// Goes on from what an earlier sandbox of this pod has told.
    pub fn remember(&mut self, before: &ContainerStatus, now: Instant) {
        self.restarts = before.restart_count;
        self.previous = before
            .last_state
            .as_ref()
            .and_then(|s| s.terminated.clone());
        let state = before.state.clone().unwrap_or_default();
        if let Some(terminated) = state.terminated {
            self.has_run = true;
            self.id = before.container_id.as_deref().map(bare_id);
            self.ended = Some(TerminatedRun {
                state: terminated,
                at: now,
                restart: false,
                before_restart: true,
            });
        } else if state.running.is_some() {
            self.has_run = true;
            self.id = before.container_id.as_deref().map(bare_id);
            self.ended = Some(TerminatedRun {
                state: ContainerStateTerminated {
                    exit_code: 137,
                    reason: Some("ContainerStatusUnknown".to_owned()),
                    message: Some(
                        "The container could not be located when the pod was deleted.  The container used to be Running"
                            .to_owned(),
                    ),
                    ..Default::default()
                },
                at: now,
                restart: false,
                before_restart: true,
            });
            // Shown as waiting with this as its last state, as upstream does after a reboot.
            self.waiting = Some(Problem {
                reason: "ContainerCreating".to_owned(),
                message: String::new(),
            });
        } else if self.previous.is_some() {
            self.has_run = true;
        }
    }

    /// The name in the spec.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// As events name it.
    pub fn field_path(&self) -> String {
        let list = match self.kind {
            ContainerType::Init | ContainerType::Sidecar => "initContainers",
            ContainerType::Regular => "containers",
            ContainerType::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{}}}", self.name())
    }

    /// The number of the next run.
    pub fn next_attempt(&self) -> i32 {
        if self.has_run {
            self.restarts.saturating_add(1)
        } else {
            self.restarts
        }
    }

    /// The present run becomes the newest one: from now on its container is what the record shows.
    pub fn adopt(&mut self) {
        if let Some(ended) = self.ended.take() {
            self.previous = Some(ended.state);
        }
        self.restarts = self.next_attempt();
        self.has_run = true;
        let container = self.run.as_mut().and_then(|run| run.container.take());
        if let Some((id, image, user)) = container {
            self.id = Some(id);
            self.image = Some(image);
            self.user = user;
        }
    }

    /// It runs, and its postStart hook is done.
    pub fn running(&self) -> bool {
        self.run
            .as_ref()
            .is_some_and(|run| matches!(run.stage, RunStage::Running { .. }))
    }

    /// It runs and its startup probe, if it has one, has found it up.
    pub fn started(&self) -> bool {
        self.running()
            && (self.spec.startup_probe.is_none()
                || self
                    .run
                    .as_ref()
                    .is_some_and(|run| run.startup == Some(true)))
    }

    /// It is up and its readiness probe, if it has one, finds it ready.
    pub fn ready(&self) -> bool {
        self.started()
            && (self.spec.readiness_probe.is_none()
                || self.run.as_ref().is_some_and(|run| run.ready))
    }

    /// The exit code of the newest run, if it ended in this life of the pod.
    pub fn exit(&self) -> Option<&TerminatedRun> {
        self.ended.as_ref().filter(|ended| !ended.before_restart)
    }

    /// An init container that has done its work.
    pub fn succeeded(&self) -> bool {
        self.exit().is_some_and(TerminatedRun::succeeded)
    }

    /// A container that isn't running is to be (re)started, now or after a while.
    pub fn wants_start(&self, pod: RestartPolicy) -> bool {
        if self.run.is_some() {
            return false;
        }
        let Some(ended) = &self.ended else {
            return true;
        };
        match self.kind {
            ContainerType::Ephemeral => false,
            ContainerType::Sidecar => true,
            ContainerType::Init if ended.before_restart => true,
            ContainerType::Init if ended.succeeded() => false,
            ContainerType::Init => restart::wanted(&self.spec, pod, ended.failure_code()),
            ContainerType::Regular => {
                ended.restart || restart::wanted(&self.spec, pod, ended.state.exit_code)
            }
        }
    }

    /// Its end asks for a restart of all containers.
    pub fn wants_restart_of_all(&self) -> bool {
        self.run.is_none()
            && self.kind != ContainerType::Ephemeral
            && self
                .exit()
                .is_some_and(|ended| restart::of_all(&self.spec, ended.state.exit_code))
    }

    /// Everything starts over, with restart counts going on.
    pub fn reset(&mut self) {
        if !self.wants_restart_of_all() {
            self.back_off.clear();
        }
        if let Some(ended) = &mut self.ended {
            ended.before_restart = true;
            ended.restart = true;
            self.waiting = Some(Problem {
                reason: "RestartingAllContainers".to_owned(),
                message: "The container is removed because RestartAllContainers in place"
                    .to_owned(),
            });
        }
        self.started_once = false;
    }
}

impl TerminatedRun {
    /// Exit code 0, and not for want of memory.
    pub fn succeeded(&self) -> bool {
        self.state.exit_code == 0 && self.state.reason.as_deref() != Some("OOMKilled")
    }

    /// The exit code, but never 0 for a failure.
    fn failure_code(&self) -> i32 {
        if self.state.exit_code == 0 {
            137
        } else {
            self.state.exit_code
        }
    }
}

/// An id without the runtime's name in front.
fn bare_id(id: &str) -> String {
    id.rsplit("//").next().unwrap_or(id).to_owned()
}

/// A state of the API that says nothing but how a run ended.
pub fn terminated(state: ContainerStateTerminated) -> ContainerState {
    ContainerState {
        terminated: Some(state),
        ..Default::default()
    }
}

/// The container that an ephemeral container is, but for its target.
pub fn as_container(ephemeral: &EphemeralContainer) -> Container {
    let e = ephemeral.clone();
    Container {
        args: e.args,
        command: e.command,
        env: e.env,
        env_from: e.env_from,
        image: e.image,
        image_pull_policy: e.image_pull_policy,
        lifecycle: e.lifecycle,
        liveness_probe: e.liveness_probe,
        name: e.name,
        ports: e.ports,
        readiness_probe: e.readiness_probe,
        resize_policy: e.resize_policy,
        resources: e.resources,
        restart_policy: e.restart_policy,
        restart_policy_rules: e.restart_policy_rules,
        security_context: e.security_context,
        startup_probe: e.startup_probe,
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path,
        termination_message_policy: e.termination_message_policy,
        tty: e.tty,
        volume_devices: e.volume_devices,
        volume_mounts: e.volume_mounts,
        working_dir: e.working_dir,
    }
}
