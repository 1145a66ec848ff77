//! Starts a container.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use k8s_openapi::api::core::v1::{ContainerUser, LinuxContainerUser};
use k8s_openapi::jiff::Timestamp;
use linux::cgroup::Cgroup;
use linux::container_processes::ContainerProcesses;
use linux::namespace::MappedIds;
use pod_protocol::Problem;
use rustix::process::Signal;
use tokio::sync::watch;

use super::container_exit::ExitWatch;
use super::inner::message::{
    ContainerIdentity, ContainerPlan, InnerError, InnerErrorKind, InnerRequest, PidNamespace,
};
use super::inner_client::InnerProcess;
use super::oom_watch::OomWatch;
use super::rootfs::unmount_fuse;
use super::stdio::StdioPipes;
use super::{
    LinuxRuntime, PodAddresses, RunningContainer, cgroups, cleanup, etc, file_key_ref,
    oom_score_adj, plan, streaming, sub_paths,
};
use crate::container_runtime::{StartFailure, StartRequest, StartedContainer};
use crate::node_services::NodeServices;

impl<S: NodeServices> LinuxRuntime<S> {
    pub(super) async fn start_container(
        &self,
        request: &StartRequest,
    ) -> Result<StartedContainer, StartFailure> {
        let mut plan = self.prepare(request).await?;
        let cgroup = self.create_container_cgroup(request).await;
        let cgroup = cgroup.map_err(create_error("cannot create the container's cgroup"))?;
        plan.process.cgroup = cgroup.as_ref().map(|cgroup| cgroup.path().to_owned());
        let oom = Rc::new(OomWatch::new(cgroup));
        // The kernel kills all processes of a pid namespace with its first.
        let owns_pid_namespace = plan.pid_namespace == PidNamespace::Own;
        let process_plan = plan.process.clone();
        let has_stdin = request.container.stdin == Some(true);
        let pipes = StdioPipes::new(plan.process.terminal, has_stdin)
            .map_err(create_error("cannot create the container's pipes"))?;
        let mut log = self
            .logs
            .writer(&request.container.name, request.attempt)
            .map_err(create_error("cannot open the container's log"))?;
        let InnerProcess {
            serial,
            descriptors,
            exit,
            identity,
        } = self.start_process(request, plan, &pipes, &oom).await?;
        let started_at = Timestamp::now();
        let mut descriptors = descriptors.into_iter();
        let process = descriptors
            .next()
            .ok_or_else(|| create_problem("the inner process sent no pidfd".to_owned()))?;
        let mount_namespace = descriptors.next().filter(|_| !owns_pid_namespace);
        let processes = mount_namespace
            .map(ContainerProcesses::in_mount_namespace)
            .transpose()
            .map_err(create_error(
                "cannot inspect the container's mount namespace",
            ))?;
        let log_warnings = log.warnings();
        let (attachable, copying) =
            streaming::connect(pipes, descriptors.next(), &request.container, log);
        let id = crate::container_id::generate();
        let container = RunningContainer {
            name: request.container.name.clone(),
            attempt: request.attempt,
            started_at,
            serial,
            process: Rc::new(process),
            plan: process_plan,
            resources: RefCell::new(request.container.resources.clone()),
            oom: oom.clone(),
            attachable,
            alive: watch::Sender::new(()),
        };
        self.containers.borrow_mut().insert(id.clone(), container);
        let exit = self.watch_exit(ExitWatch {
            id: id.clone(),
            fuse_root: self.fuse_root(request),
            processes,
            oom,
            exit,
            copying,
        });
        Ok(StartedContainer {
            id,
            started_at,
            exit,
            stop_signal: stop_signal(request),
            user: identity.map(container_user),
            log_warnings,
        })
    }

    /// Starts the first process of a container. Removes its cgroup and mounts if that fails.
    async fn start_process(
        &self,
        request: &StartRequest,
        plan: ContainerPlan,
        pipes: &StdioPipes,
        oom: &OomWatch,
    ) -> Result<InnerProcess, StartFailure> {
        let start = InnerRequest::StartContainer(Box::new(plan));
        match self.inner.start_process(start, &pipes.theirs()).await {
            Ok(process) => Ok(process),
            Err(error) => {
                if let Some(cgroup) = oom.cgroup() {
                    cgroups::remove_cgroup(cgroup).await;
                }
                unmount_fuse(&self.fuse_mounts, &self.fuse_root(request)).await;
                Err(start_failure(error))
            }
        }
    }

    /// Plans a container, and creates what it mounts: volumes, sub-paths, and its root file system if that is a FUSE mount.
    async fn prepare(&self, request: &StartRequest) -> Result<ContainerPlan, Problem> {
        let bundle = self.bundle.borrow().clone();
        for mount in request.container.volume_mounts.iter().flatten() {
            self.create_volume(&bundle, &mount.name).await?;
        }
        let mut plan = self.plan(request)?;
        plan.mounts = sub_paths::create(plan.mounts, &request.container.name).await?;
        let dir = self.container_dir(request);
        create_container_dir(&dir)
            .map_err(|error| create_problem(format!("cannot create {}: {error}", dir.display())))?;
        cleanup::remove_earlier_attempts(&dir, request.attempt).await;
        let mounted = self.mount_fuse_root(request, &dir).await;
        mounted.map_err(create_error("cannot mount the image"))?;
        Ok(plan)
    }

    /// The directory of one attempt of a container.
    pub(super) fn container_dir(&self, request: &StartRequest) -> PathBuf {
        let attempt = request.attempt.to_string();
        self.dirs
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
        let no_addresses = PodAddresses::default();
        let context = plan::PodContext {
            spec: &spec,
            oom_score_adj: oom_score_adj::oom_score_adj(
                &bundle.pod,
                &request.container,
                bundle.node.memory_bytes,
            ),
            hostname: &hostname,
            etc: &self.dirs.etc(),
            shm: &self.dirs.memory.join("shm"),
            volumes: &self.volumes.borrow(),
            addresses: self.addresses.get().unwrap_or(&no_addresses),
            single_id: self.ids == MappedIds::One,
            has_cgroup: self.cgroup.get().is_some(),
            root: self.rootfs_kind(request),
        };
        let mut request = request.clone();
        request.input.env = file_key_ref::resolve(&request.input.env, context.volumes)?;
        plan::plan_container(&context, &request, &self.container_dir(&request), target)
    }

    fn serial_of(&self, name: &str) -> Result<u64, Problem> {
        let containers = self.containers.borrow();
        let mut running = containers.values();
        let found = running.find(|container| container.name == name);
        found.map(|container| container.serial).ok_or_else(|| {
            Problem::new(
                "CreateContainerConfigError",
                format!("target container \"{name}\" is not running"),
            )
        })
    }

    async fn create_container_cgroup(
        &self,
        request: &StartRequest,
    ) -> std::io::Result<Option<Cgroup>> {
        match self.cgroup.get() {
            Some(pod) => cgroups::create_container_cgroup(pod, &request.container, request.attempt)
                .await
                .map(Some),
            None => Ok(None),
        }
    }
}

fn create_container_dir(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(dir)?;
    let file = std::fs::File::create(dir.join("termination-log"))?;
    // The container's user, whatever it is, writes to it.
    file.set_permissions(std::fs::Permissions::from_mode(0o666))
}

/// `lifecycle.stopSignal`, else the image's STOPSIGNAL, else SIGTERM.
fn stop_signal(request: &StartRequest) -> i32 {
    let lifecycle = request.container.lifecycle.as_ref();
    let wanted = lifecycle.and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    wanted
        .or(request.image.config.stop_signal.as_deref())
        .and_then(linux::signal::number_by_name)
        .unwrap_or(Signal::TERM.as_raw())
}

fn container_user(identity: ContainerIdentity) -> ContainerUser {
    let groups = identity.groups.into_iter().map(i64::from).collect();
    ContainerUser {
        linux: Some(LinuxContainerUser {
            uid: identity.uid.into(),
            gid: identity.gid.into(),
            supplemental_groups: Some(groups),
        }),
    }
}

fn start_failure(error: InnerError) -> StartFailure {
    match error.kind {
        InnerErrorKind::Program => StartFailure::Program(error.message),
        InnerErrorKind::Runtime => StartFailure::Create(create_problem(error.message)),
    }
}

/// Prefixes an error with what failed.
fn create_error<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> Problem {
    move |error| create_problem(format!("{what}: {error}"))
}

fn create_problem(message: String) -> Problem {
    Problem::new("CreateContainerError", message)
}
