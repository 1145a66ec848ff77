//! The state of one container of the pod.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, ContainerUser,
    EphemeralContainer, ResourceRequirements,
};
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::back_off::BackOff;
use super::restart::{self, RestartPolicy};
use crate::seams::PodImage;
use pod_protocol::Problem;

/// The kind of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Runs to completion before the next container is started.
    Init,
    /// A restartable init container: it has to have started before the next container is, and is stopped last.
    Sidecar,
    /// One of `spec.containers`.
    Regular,
    /// Added to a running pod for debugging; never restarted.
    Ephemeral,
}

/// One container: its spec, and the history of its runs.
#[derive(Clone, Debug)]
pub struct Record {
    pub kind: Kind,
    /// From the newest bundle.
    pub spec: Container,
    /// `targetContainerName` of an ephemeral container.
    pub target: Option<String>,
    /// The current run; `None` if the container neither runs nor is being started.
    pub run: Option<Run>,
    /// The exit of the newest run, until [`Self::adopt`] replaces that run by a newer one.
    pub ended: Option<Ended>,
    /// The exit of the run before.
    pub previous: Option<ContainerStateTerminated>,
    /// The id of the newest container.
    pub id: Option<String>,
    /// The image of the newest container.
    pub image: Option<PodImage>,
    /// The user of the newest container's first process.
    pub user: Option<ContainerUser>,
    /// The number of the newest run, counted from 0.
    pub restarts: i32,
    /// Whether there was a run with that number.
    pub has_run: bool,
    /// The reason why it isn't running, if known.
    pub waiting: Option<Problem>,
    /// The failure of its last pull.
    pub pull_failure: Option<PullFailure>,
    /// The delay between restarts.
    pub back_off: BackOff,
    /// The delay between pulls.
    pub pull_back_off: BackOff,
    /// Earliest time of the next attempt, if the last one failed before it created a container.
    pub retry: Option<Instant>,
    /// The bundle reports a problem, such as a missing ConfigMap. Retried when a bundle reports none.
    pub held: bool,
    /// A sidecar that has started once; it no longer blocks the containers after it.
    pub passed: bool,
}

/// A container that is running or being started.
#[derive(Clone, Debug)]
pub struct Run {
    /// Unique among all runs of the pod.
    pub serial: u64,
    /// The image as the spec named it when this run began.
    pub image: String,
    /// The resources that it was started with.
    pub resources: Option<ResourceRequirements>,
    pub stage: Stage,
    /// Id, image and user of its container, until [`Record::adopt`] takes them.
    pub container: Option<(String, PodImage, Option<ContainerUser>)>,
    /// Set if it is being stopped.
    pub kill: Option<Kill>,
    /// The result of the startup probe; `false` if it reached its failure threshold.
    pub startup: Option<bool>,
    /// The liveness probe has reached its failure threshold.
    pub dead: bool,
    /// The readiness probe has reached its success threshold.
    pub ready: bool,
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its image is being pulled, or its container created.
    Preparing,
    /// The container runs, but its postStart hook has not finished.
    Hook {
        /// The container's start time.
        at: Timestamp,
    },
    Running {
        /// The container's start time.
        at: Timestamp,
    },
}

/// An order to stop a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kill {
    /// End of the grace period.
    pub deadline: Instant,
    /// The stop signal may be sent: the containers that must end before this one have ended.
    pub turn: bool,
    /// Restart it afterwards, regardless of its restart policy.
    pub restart: bool,
}

/// The exit of a run.
#[derive(Clone, Debug)]
pub struct Ended {
    /// As the API shows it.
    pub state: ContainerStateTerminated,
    /// On the monotonic clock.
    pub at: Instant,
    /// Restart it, regardless of its restart policy.
    pub restart: bool,
    /// The run ended before all containers were restarted, or in an earlier sandbox. Init containers have to run again.
    pub stale: bool,
}

#[derive(Clone, Debug)]
pub struct PullFailure {
    pub image: String,
    /// The reason and the message, joined by a colon.
    pub message: String,
    pub at: Instant,
    /// The status shows ImagePullBackOff already.
    pub shown: bool,
}

impl Record {
    /// A container without any runs.
    pub fn new(kind: Kind, spec: Container, target: Option<String>) -> Self {
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
            held: false,
            passed: false,
        }
    }

    /// Restores the record from the status that an earlier sandbox of this pod reported.
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
            self.ended = Some(Ended {
                state: terminated,
                at: now,
                restart: false,
                stale: true,
            });
        } else if state.running.is_some() {
            self.has_run = true;
            self.id = before.container_id.as_deref().map(bare_id);
            self.ended = Some(Ended {
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
                stale: true,
            });
            // The status shows it as waiting with this as its last state, as upstream does after a reboot.
            self.waiting = Some(Problem {
                reason: "ContainerCreating".to_owned(),
                message: String::new(),
            });
        } else if self.previous.is_some() {
            self.has_run = true;
        }
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The field path of its events.
    pub fn field_path(&self) -> String {
        let list = match self.kind {
            Kind::Init | Kind::Sidecar => "initContainers",
            Kind::Regular => "containers",
            Kind::Ephemeral => "ephemeralContainers",
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

    /// Makes the current run the newest one: from now on, the status shows its container.
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
            .is_some_and(|run| matches!(run.stage, Stage::Running { .. }))
    }

    /// It runs, and its startup probe, if it has one, has succeeded.
    pub fn started(&self) -> bool {
        self.running()
            && (self.spec.startup_probe.is_none()
                || self
                    .run
                    .as_ref()
                    .is_some_and(|run| run.startup == Some(true)))
    }

    /// It has started, and its readiness probe, if it has one, succeeds.
    pub fn ready(&self) -> bool {
        self.started()
            && (self.spec.readiness_probe.is_none()
                || self.run.as_ref().is_some_and(|run| run.ready))
    }

    /// The exit of the newest run, unless it is stale.
    pub fn exit(&self) -> Option<&Ended> {
        self.ended.as_ref().filter(|ended| !ended.stale)
    }

    /// The newest run succeeded, and is not stale. Meant for init containers.
    pub fn succeeded(&self) -> bool {
        self.exit().is_some_and(Ended::succeeded)
    }

    /// Whether a container without a run is to be (re)started, now or after its back-off.
    pub fn wants_start(&self, pod: RestartPolicy) -> bool {
        if self.run.is_some() {
            return false;
        }
        let Some(ended) = &self.ended else {
            return true;
        };
        match self.kind {
            Kind::Ephemeral => false,
            Kind::Sidecar => true,
            Kind::Init if ended.stale => true,
            Kind::Init if ended.succeeded() => false,
            Kind::Init => restart::wanted(&self.spec, pod, ended.failure_code()),
            Kind::Regular => {
                ended.restart || restart::wanted(&self.spec, pod, ended.state.exit_code)
            }
        }
    }

    /// Its exit triggers a restart of all containers.
    pub fn asks_for_reset(&self) -> bool {
        self.run.is_none()
            && self.kind != Kind::Ephemeral
            && self
                .exit()
                .is_some_and(|ended| restart::of_all(&self.spec, ended.state.exit_code))
    }

    /// Prepares a restart of all containers. Restart counts continue.
    pub fn reset(&mut self) {
        if !self.asks_for_reset() {
            self.back_off.clear();
        }
        if let Some(ended) = &mut self.ended {
            ended.stale = true;
            ended.restart = true;
            self.waiting = Some(Problem {
                reason: "RestartingAllContainers".to_owned(),
                message: "The container is removed because RestartAllContainers in place"
                    .to_owned(),
            });
        }
        self.passed = false;
    }
}

impl Ended {
    /// Exit code 0, and not OOM-killed.
    pub fn succeeded(&self) -> bool {
        self.state.exit_code == 0 && self.state.reason.as_deref() != Some("OOMKilled")
    }

    /// The exit code of a failed run; 137 if it is 0, as it can be after an OOM kill.
    fn failure_code(&self) -> i32 {
        if self.state.exit_code == 0 {
            137
        } else {
            self.state.exit_code
        }
    }
}

/// The id without the `coracle://` prefix.
fn bare_id(id: &str) -> String {
    id.rsplit("//").next().unwrap_or(id).to_owned()
}

pub fn terminated(state: ContainerStateTerminated) -> ContainerState {
    ContainerState {
        terminated: Some(state),
        ..Default::default()
    }
}

/// Converts an ephemeral container. Its target has no counterpart and is dropped.
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
