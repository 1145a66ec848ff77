//! The state of one container of the pod.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, ContainerUser,
    EphemeralContainer, ResourceRequirements,
};
use k8s_openapi::jiff::Timestamp;
use pod_protocol::Problem;
use pod_protocol::restart::{self, RestartPolicy};
use pod_protocol::termination::{TerminationReason, unknown_termination};
use tokio::time::Instant;

use super::back_off::ContainerBackOff;
use crate::container_id;
use crate::container_runtime::PodImage;

/// The type of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerType {
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
pub struct ContainerRecord {
    pub container_type: ContainerType,
    /// From the newest bundle.
    pub spec: Container,
    /// `targetContainerName` of an ephemeral container.
    pub target: Option<String>,
    /// The current run; `None` if the container neither runs nor is being started.
    pub run: Option<ContainerRun>,
    /// The last run that has terminated, until [`Self::show_current_run`] replaces it.
    pub last_run: Option<TerminatedRun>,
    /// The exit of the run before that.
    pub run_before_last: Option<ContainerStateTerminated>,
    /// The id of the newest container.
    pub id: Option<String>,
    /// The image of the newest container.
    pub image: Option<PodImage>,
    /// The user of the newest container's first process.
    pub user: Option<ContainerUser>,
    /// The number of the newest run, counted from 0.
    pub restart_count: i32,
    /// Whether there was a run with that number.
    pub has_run: bool,
    /// Why it is not running, if known.
    pub waiting: Option<WaitingState>,
    /// The failure of its last pull.
    pub pull_failure: Option<PullFailure>,
    /// The delay between restarts.
    pub back_off: ContainerBackOff,
    /// The delay between pulls.
    pub pull_back_off: ContainerBackOff,
    /// Earliest time of the next attempt, if the last one failed before it created a container.
    pub retry_at: Option<Instant>,
    /// The bundle reports a problem, such as a missing ConfigMap. The container is not started until a bundle reports none.
    pub waits_for_bundle: bool,
    /// A sidecar has started once: it no longer blocks the containers after it.
    pub started_once: bool,
}

/// A container that is running or being started.
#[derive(Clone, Debug)]
pub struct ContainerRun {
    /// Unique among all runs of the pod.
    pub serial: u64,
    /// The image as the spec named it when this run began.
    pub image: String,
    /// The resources that it was started with.
    pub resources: Option<ResourceRequirements>,
    pub stage: RunStage,
    /// Its container, until [`ContainerRecord::show_current_run`] takes it.
    pub container: Option<CreatedContainer>,
    /// Set if it is being stopped.
    pub kill: Option<KillOrder>,
    /// The startup probe has reached its success threshold (`true`) or its failure threshold (`false`).
    pub startup_succeeded: Option<bool>,
    /// The liveness probe has reached its failure threshold.
    pub liveness_failed: bool,
    /// The readiness probe has reached its success threshold.
    pub ready: bool,
}

/// The container of a run.
#[derive(Clone, Debug)]
pub struct CreatedContainer {
    /// Without the prefix of statuses.
    pub id: String,
    pub image: PodImage,
    /// The user of its first process.
    pub user: Option<ContainerUser>,
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStage {
    /// Its image is being pulled, or its container created.
    Preparing,
    /// The container runs, but its postStart hook has not finished.
    PostStart {
        /// The container's start time.
        started_at: Timestamp,
    },
    Running {
        /// The container's start time.
        started_at: Timestamp,
    },
}

/// An order to stop a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillOrder {
    /// End of the grace period.
    pub deadline: Instant,
    /// The stop signal may be sent before the deadline: the containers that must end before this one have ended.
    pub may_signal: bool,
    /// Restart it afterwards, regardless of its restart policy.
    pub force_restart: bool,
}

/// A run that has terminated.
#[derive(Clone, Debug)]
pub struct TerminatedRun {
    /// As the API shows it.
    pub state: ContainerStateTerminated,
    /// When the driver learned of it.
    pub at: Instant,
    /// Restart it, regardless of its restart policy.
    pub force_restart: bool,
    /// The run was before a restart of all containers, or in an earlier sandbox. Init containers have to run again.
    pub stale: bool,
}

/// Why a container is not running.
#[derive(Clone, Debug)]
pub enum WaitingState {
    /// It is being created.
    Creating,
    /// It waits for its next restart, with this message.
    CrashLoopBackOff(String),
    /// Its postStart hook failed, with this message.
    PostStartHookError(String),
    /// Any other problem.
    Problem(Problem),
}

/// The failure of a pull.
#[derive(Clone, Debug)]
pub struct PullFailure {
    pub image: String,
    /// The reason and the message, joined by a colon.
    pub message: String,
    pub at: Instant,
    /// The status shows ImagePullBackOff already.
    pub back_off_shown: bool,
}

impl ContainerRecord {
    /// A container without any runs.
    pub fn new(container_type: ContainerType, spec: Container, target: Option<String>) -> Self {
        Self {
            container_type,
            spec,
            target,
            run: None,
            last_run: None,
            run_before_last: None,
            id: None,
            image: None,
            user: None,
            restart_count: 0,
            has_run: false,
            waiting: None,
            pull_failure: None,
            back_off: ContainerBackOff::default(),
            pull_back_off: ContainerBackOff::default(),
            retry_at: None,
            waits_for_bundle: false,
            started_once: false,
        }
    }

    /// Restores the record from the status that an earlier sandbox of this pod reported.
    pub fn restore(&mut self, status: &ContainerStatus, now: Instant) {
        self.restart_count = status.restart_count;
        self.run_before_last = status
            .last_state
            .as_ref()
            .and_then(|s| s.terminated.clone());
        let state = status.state.clone().unwrap_or_default();
        if let Some(terminated) = state.terminated {
            self.has_run = true;
            self.id = status.container_id.as_deref().map(container_id::from_api);
            self.last_run = Some(TerminatedRun {
                state: terminated,
                at: now,
                force_restart: false,
                stale: true,
            });
        } else if state.running.is_some() {
            self.has_run = true;
            self.id = status.container_id.as_deref().map(container_id::from_api);
            self.last_run = Some(TerminatedRun {
                state: unknown_termination(
                    "The container could not be located when the pod was deleted.  The container used to be Running",
                ),
                at: now,
                force_restart: false,
                stale: true,
            });
            // The status shows it as waiting with this as its last state, as upstream does after a reboot.
            self.waiting = Some(WaitingState::Creating);
        } else if self.run_before_last.is_some() {
            self.has_run = true;
        }
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The field path of its events.
    pub fn field_path(&self) -> String {
        let list = match self.container_type {
            ContainerType::Init | ContainerType::Sidecar => "initContainers",
            ContainerType::Regular => "containers",
            ContainerType::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{}}}", self.name())
    }

    /// The number of the next run.
    pub fn next_attempt(&self) -> i32 {
        if self.has_run {
            self.restart_count.saturating_add(1)
        } else {
            self.restart_count
        }
    }

    /// Makes the current run the newest one: from now on, the status shows its container.
    pub fn show_current_run(&mut self) {
        if let Some(last_run) = self.last_run.take() {
            self.run_before_last = Some(last_run.state);
        }
        self.restart_count = self.next_attempt();
        self.has_run = true;
        let container = self.run.as_mut().and_then(|run| run.container.take());
        if let Some(container) = container {
            self.id = Some(container.id);
            self.image = Some(container.image);
            self.user = container.user;
        }
    }

    /// Whether it runs and its postStart hook is done.
    pub fn is_running(&self) -> bool {
        self.run
            .as_ref()
            .is_some_and(|run| matches!(run.stage, RunStage::Running { .. }))
    }

    /// Whether it runs and its startup probe, if it has one, has succeeded.
    pub fn is_started(&self) -> bool {
        self.is_running()
            && (self.spec.startup_probe.is_none()
                || self
                    .run
                    .as_ref()
                    .is_some_and(|run| run.startup_succeeded == Some(true)))
    }

    /// Whether it is started and its readiness probe, if it has one, succeeds.
    pub fn is_ready(&self) -> bool {
        self.is_started()
            && (self.spec.readiness_probe.is_none()
                || self.run.as_ref().is_some_and(|run| run.ready))
    }

    /// The last run, unless it is stale.
    pub fn last_fresh_run(&self) -> Option<&TerminatedRun> {
        self.last_run.as_ref().filter(|run| !run.stale)
    }

    /// Whether the last run succeeded and is not stale. Meant for init containers.
    pub fn has_succeeded(&self) -> bool {
        self.last_fresh_run()
            .is_some_and(TerminatedRun::has_succeeded)
    }

    /// Whether it does not run and has to be started or restarted, now or after its back-off.
    pub fn should_start(&self, pod_policy: RestartPolicy) -> bool {
        if self.run.is_some() {
            return false;
        }
        let Some(last_run) = &self.last_run else {
            return true;
        };
        match self.container_type {
            ContainerType::Ephemeral => false,
            ContainerType::Sidecar => true,
            ContainerType::Init if last_run.stale => true,
            ContainerType::Init if last_run.has_succeeded() => false,
            ContainerType::Init => {
                restart::should_restart(&self.spec, pod_policy, last_run.failure_code())
            }
            ContainerType::Regular => {
                let exit_code = last_run.state.exit_code;
                last_run.force_restart || restart::should_restart(&self.spec, pod_policy, exit_code)
            }
        }
    }

    /// Whether a rule restarts all containers because of its exit.
    pub fn triggers_restart_all(&self) -> bool {
        self.run.is_none()
            && self.container_type != ContainerType::Ephemeral
            && self
                .last_fresh_run()
                .is_some_and(|run| restart::restarts_all(&self.spec, run.state.exit_code))
    }

    /// Prepares a restart of all containers. Restart counts continue.
    pub fn prepare_restart_all(&mut self) {
        if !self.triggers_restart_all() {
            self.back_off.reset();
        }
        if let Some(last_run) = &mut self.last_run {
            last_run.stale = true;
            last_run.force_restart = true;
            self.waiting = Some(WaitingState::Problem(Problem::new(
                restart::RESTARTING_ALL_CONTAINERS,
                "The container is removed because RestartAllContainers in place",
            )));
        }
        self.started_once = false;
    }
}

impl WaitingState {
    /// The reason and message of the API, if there is more to say than that the container is being created.
    pub fn reason_and_message(&self) -> Option<(&str, &str)> {
        match self {
            Self::Creating => None,
            Self::CrashLoopBackOff(message) => Some(("CrashLoopBackOff", message)),
            Self::PostStartHookError(message) => Some(("PostStartHookError", message)),
            Self::Problem(problem) => Some((&problem.reason, &problem.message)),
        }
    }
}

impl TerminatedRun {
    /// Whether the exit code is 0 and the container was not OOM-killed.
    pub fn has_succeeded(&self) -> bool {
        self.state.exit_code == 0 && !TerminationReason::OomKilled.is_of(&self.state)
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

/// Wraps the state of a terminated container.
pub fn terminated_state(state: ContainerStateTerminated) -> ContainerState {
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
