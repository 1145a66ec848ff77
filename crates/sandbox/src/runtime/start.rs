//! A container's start: what it will be, what it needs, and the inner process's word that it runs.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use k8s_openapi::api::core::v1::{ContainerUser, LinuxContainerUser};
use k8s_openapi::jiff::Timestamp;
use linux::cgroup::Group;
use linux::kin::Kin;
use linux::namespace::Ids;
use rustix::process::Signal;
use tokio::sync::watch;

use super::inside::{Process, Refusal};
use super::root::hide;
use super::{
    Addresses, LinuxRuntime, Running, env_files, etc, groups, oom, oom_score, output, plan,
    remains, streams, sub_paths,
};
use crate::inner::message::{ContainerPlan, Identity, Processes, Request};
use crate::seams::{StartRequest, Started, World};
use pod_protocol::Problem;

impl<W: World> LinuxRuntime<W> {
    pub(super) async fn start_container(&self, request: &StartRequest) -> Result<Started, Problem> {
        let bundle = self.bundle.borrow().clone();
        for mount in request.container.volume_mounts.iter().flatten() {
            self.make_volume(&bundle, &mount.name).await?;
        }
        let mut plan = self.plan(request)?;
        plan.mounts = sub_paths::checked(plan.mounts, &request.container.name).await?;
        let dir = self.container_dir(request);
        make_container_dir(&dir)
            .map_err(|error| not_created(format!("{}: {error}", dir.display())))?;
        remains::remove_earlier(&dir, request.attempt).await;
        self.show_root(request, &dir)
            .await
            .map_err(|error| not_created(format!("mounting the image: {error}")))?;
        let stop_signal = stop_signal(request);
        let group = self
            .make_container_group(request)
            .await
            .map_err(|error| not_created(format!("the container's control group: {error}")))?;
        plan.process.group = group.as_ref().map(|group| group.path().to_owned());
        let memory = Rc::new(oom::Watch::new(group));
        // The kernel ends all processes of a namespace with the first.
        let alone = plan.processes == Processes::Own;
        let process_plan = plan.process.clone();
        let pipes =
            output::Pipes::new(plan.process.terminal, request.container.stdin == Some(true))
                .map_err(|error| not_created(format!("making the container's pipes: {error}")))?;
        let mut log = self
            .logs
            .writer(&request.container.name, request.attempt)
            .map_err(|error| not_created(error.to_string()))?;
        let started = self
            .inside
            .start(Request::Start(Box::new(plan)), &pipes.theirs())
            .await;
        let Process {
            serial,
            descriptors,
            end,
            identity,
        } = match started {
            Ok(process) => process,
            Err(refusal) => {
                if let Some(group) = memory.group() {
                    groups::end(group).await;
                }
                hide(&self.shown, &self.root_place(request)).await;
                return Err(start_problem(refusal));
            }
        };
        let at = Timestamp::now();
        let mut descriptors = descriptors.into_iter();
        let process = descriptors.next().ok_or_else(|| {
            start_problem(Refusal {
                message: "the inner process told of no process".to_owned(),
                program: false,
            })
        })?;
        let kin = descriptors.next().filter(|_| !alone).map(Kin::of);
        let kin = kin
            .transpose()
            .map_err(|error| not_created(format!("the container's mount namespace: {error}")))?;
        let log_warnings = log.warnings();
        let (attachable, copying) =
            streams::connect(pipes, descriptors.next(), &request.container, log);
        let id = crate::id::new();
        let running = Running {
            name: request.container.name.clone(),
            attempt: request.attempt,
            started: at,
            serial,
            process: Rc::new(process),
            plan: process_plan,
            resources: RefCell::new(request.container.resources.clone()),
            memory: memory.clone(),
            attachable,
            alive: watch::Sender::new(()),
        };
        self.containers.borrow_mut().insert(id.clone(), running);
        let root = self.root_place(request);
        let exit = self.watch_for_end(id.clone(), root, kin, memory, end, copying);
        Ok(Started {
            id,
            at,
            exit,
            stop_signal,
            user: identity.map(container_user),
            log_warnings,
        })
    }

    /// The directory of one run of a container.
    pub(super) fn container_dir(&self, request: &StartRequest) -> PathBuf {
        let attempt = request.attempt.to_string();
        self.places
            .disk
            .join("containers")
            .join(&request.container.name)
            .join(attempt)
    }

    fn plan(&self, request: &StartRequest) -> Result<ContainerPlan, Problem> {
        let bundle = self.bundle.borrow().clone();
        let spec = self.spec();
        let target = match &request.target {
            Some(name) => Some(self.serial_of(name)?),
            None => None,
        };
        let hostname = match spec.host_network {
            Some(true) => rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            _ => etc::hostname(&bundle.pod, &bundle.node.cluster_domain),
        };
        let none = Addresses::default();
        let place = plan::PodPlace {
            spec: &spec,
            oom_score_adj: oom_score::adjustment(
                &bundle.pod,
                &request.container,
                bundle.node.memory_bytes,
            ),
            hostname: &hostname,
            etc: &self.places.etc(),
            shm: &self.places.memory.join("shm"),
            volumes: &self.volumes.borrow(),
            addresses: self.addresses.get().unwrap_or(&none),
            one_id: self.ids == Ids::One,
            has_group: self.group.get().is_some(),
            root: self.root_kind(request),
        };
        let mut request = request.clone();
        request.input.env = env_files::put_in(&request.input.env, place.volumes)?;
        plan::container(&place, &request, &self.container_dir(&request), target)
    }

    fn serial_of(&self, name: &str) -> Result<u64, Problem> {
        let containers = self.containers.borrow();
        let found = containers.values().find(|running| running.name == name);
        found.map(|running| running.serial).ok_or_else(|| Problem {
            reason: "CreateContainerConfigError".to_owned(),
            message: format!("target container \"{name}\" is not running"),
        })
    }

    async fn make_container_group(&self, request: &StartRequest) -> std::io::Result<Option<Group>> {
        match self.group.get() {
            Some(pod) => groups::make_container(pod, &request.container, request.attempt)
                .await
                .map(Some),
            None => Ok(None),
        }
    }
}

fn make_container_dir(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(dir)?;
    let file = std::fs::File::create(dir.join("termination-log"))?;
    // Whoever the container's user is.
    file.set_permissions(std::fs::Permissions::from_mode(0o666))
}

/// `lifecycle.stopSignal`, else the image's, else SIGTERM.
fn stop_signal(request: &StartRequest) -> i32 {
    let lifecycle = request.container.lifecycle.as_ref();
    let wanted = lifecycle.and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    wanted
        .or(request.image.config.stop_signal.as_deref())
        .and_then(linux::signal::by_name)
        .unwrap_or(Signal::TERM.as_raw())
}

fn container_user(identity: Identity) -> ContainerUser {
    let groups = identity.groups.into_iter().map(i64::from).collect();
    ContainerUser {
        linux: Some(LinuxContainerUser {
            uid: identity.uid.into(),
            gid: identity.gid.into(),
            supplemental_groups: Some(groups),
        }),
    }
}

fn start_problem(refusal: Refusal) -> Problem {
    let reason = if refusal.program {
        "StartError"
    } else {
        "CreateContainerError"
    };
    Problem {
        reason: reason.to_owned(),
        message: refusal.message,
    }
}

fn not_created(message: String) -> Problem {
    Problem {
        reason: "CreateContainerError".to_owned(),
        message,
    }
}
