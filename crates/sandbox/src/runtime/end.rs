//! The end of a container, and of the pod.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use linux::kin::Kin;
use rustix::process::Signal;
use tokio::sync::oneshot;

use super::root::hide;
use super::{LinuxRuntime, groups, inside, last_words, oom, remains};
use crate::seams::{Exit, StartRequest, World};

/// The log's end as a termination message: so many lines, so many bytes.
const LOG_TAIL: (u64, usize) = (80, 2048);

impl<W: World> LinuxRuntime<W> {
    /// Tells of a container's end, after its last words are in its log.
    pub(super) fn watch_for_end(
        &self,
        id: String,
        root: PathBuf,
        kin: Option<Kin>,
        memory: Rc<oom::Watch>,
        end: oneshot::Receiver<inside::End>,
        copying: tokio::task::JoinHandle<()>,
    ) -> oneshot::Receiver<Exit> {
        let (tell, exit) = oneshot::channel();
        let containers = self.containers.clone();
        let shown = self.shown.clone();
        tokio::task::spawn_local(async move {
            let (code, signal) = end.await.unwrap_or((137, Some(9)));
            let at = Timestamp::now();
            let running = containers.borrow_mut().remove(&id);
            let taps = running.map(|running| running.attachable.taps);
            if let Some(group) = memory.group() {
                group.kill();
            }
            if let Some(kin) = kin {
                remains::end(kin).await;
            }
            // Not for ever: a process that left the container may still hold the pipe.
            let _ = tokio::time::timeout(Duration::from_secs(2), copying).await;
            if let Some(taps) = taps {
                taps.close();
            }
            let oom_killed = memory.was_it(code);
            let _ = tell.send(Exit {
                code,
                signal,
                oom_killed,
                at,
            });
            if let Some(group) = memory.group() {
                groups::end(group).await;
            }
            hide(&shown, &root).await;
        });
        exit
    }

    pub(super) async fn last_words_of(
        &self,
        request: &StartRequest,
        failed: bool,
    ) -> Option<String> {
        let dir = self.container_dir(request);
        let message = last_words::read(&dir.join("termination-log")).unwrap_or_default();
        // That was the last that anybody wants to know of it.
        tokio::task::spawn_local(remains::remove(dir));
        let policy = request.container.termination_message_policy.as_deref();
        if message.is_empty() && failed && policy == Some("FallbackToLogsOnError") {
            let (lines, size) = LOG_TAIL;
            let name = &request.container.name;
            return Some(
                self.logs
                    .tail_text(name, request.attempt, lines, size)
                    .await,
            );
        }
        (!message.is_empty()).then_some(message)
    }

    pub(super) async fn take_down(&self) {
        self.is_ending.set(true);
        self.host_ports.take();
        if self.spec().host_pid == Some(true) {
            // There is no namespace whose end would be theirs: the inner process kills all that descends from it.
            self.inside.hang_up();
        } else {
            // Its death is the death of all in the pod's process namespace.
            let _ = rustix::process::kill_process(self.inner, Signal::KILL);
        }
        self.inside.gone().await;
        if let Some(group) = self.group.get() {
            groups::end(group).await;
        }
        let shown: Vec<PathBuf> = self.shown.borrow().keys().cloned().collect();
        for place in shown {
            hide(&self.shown, &place).await;
        }
        for path in self.shared.take().iter().rev() {
            if let Err(error) = linux::mount::detach(path) {
                tracing::warn!(path = %path.display(), %error, "cannot unmount a volume");
            }
        }
        self.world.leave().await;
        for dir in ["containers", "images"] {
            remains::remove(self.places.disk.join(dir)).await;
        }
    }
}
