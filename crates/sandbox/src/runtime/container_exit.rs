//! The exit of a container.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use linux::container_processes::ContainerProcesses;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::inner::message::ProcessExit;
use super::oom_watch::OomWatch;
use super::rootfs::unmount_fuse;
use super::{LinuxRuntime, cgroups, cleanup};
use crate::container_runtime::ContainerExit;
use crate::node_services::NodeServices;

/// How long the rest of a container's output is waited for: a process that left the container may hold its pipes open.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// A container whose exit is awaited.
pub(super) struct ExitWatch {
    /// The container's id.
    pub id: String,
    /// Where fuse-overlayfs mounts its root file system, if it does.
    pub fuse_root: PathBuf,
    /// Its processes, if it shares its pid namespace.
    pub processes: Option<ContainerProcesses>,
    pub oom: Rc<OomWatch>,
    /// The exit of its first process.
    pub exit: oneshot::Receiver<ProcessExit>,
    /// Copies its output to the log.
    pub copying: JoinHandle<()>,
}

impl<S: NodeServices> LinuxRuntime<S> {
    /// Cleans up after a container when it exits. The exit is reported after the container's output is in its log.
    pub(super) fn watch_exit(&self, watch: ExitWatch) -> oneshot::Receiver<ContainerExit> {
        let ExitWatch {
            id,
            fuse_root,
            processes,
            oom,
            exit,
            copying,
        } = watch;
        let (sender, receiver) = oneshot::channel();
        let containers = self.containers.clone();
        let fuse_mounts = self.fuse_mounts.clone();
        tokio::task::spawn_local(async move {
            let ProcessExit { code, signal } = exit.await.unwrap_or(ProcessExit::SIGKILL);
            let finished_at = Timestamp::now();
            let container = containers.borrow_mut().remove(&id);
            let subscribers = container.map(|container| container.attachable.subscribers);
            if let Some(cgroup) = oom.cgroup() {
                cgroup.kill();
            }
            if let Some(processes) = processes {
                cleanup::kill_processes(processes).await;
            }
            let _ = tokio::time::timeout(OUTPUT_TIMEOUT, copying).await;
            if let Some(subscribers) = subscribers {
                subscribers.close();
            }
            let oom_killed = oom.is_oom_kill(code);
            let _ = sender.send(ContainerExit {
                code,
                signal,
                oom_killed,
                finished_at,
            });
            if let Some(cgroup) = oom.cgroup() {
                cgroups::remove_cgroup(cgroup).await;
            }
            unmount_fuse(&fuse_mounts, &fuse_root).await;
        });
        receiver
    }
}
