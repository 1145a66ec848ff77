//! The pod, as its kubelet speaks with it: the life, once there is a bundle, and the logs.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use pod_protocol::connection::{LogByteStream, SandboxService};
use pod_protocol::streams::{FrameStream, FrameReader};
use pod_protocol::usage::PodUsage;
use pod_protocol::{AttachQuery, Bundle, ExecQuery, LogQuery, PodState, Problem, Stop};
use sandbox::lifecycle::checkpoint::Checkpoint;
use sandbox::lifecycle::{self, LifecycleHandle};
use sandbox::logs::LogDir;
use sandbox::runtime::{LinuxRuntime, PodDirs};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, watch};

use super::puller::Puller;
use super::world::NodeWorld;
use super::{Processes, Start, eviction};

/// How long those who read a log may go on when a sandbox is to leave that holds a share of the node …
const READERS_PATIENCE: Duration = Duration::from_secs(60);
/// … and how often it is looked whether they do.
const READERS_PAUSE: Duration = Duration::from_millis(50);
/// What of a bundle could not be done is tried again after so long.
const RETRY: Duration = Duration::from_secs(10);

/// One pod.
pub struct SandboxPod {
    logs: LogDir,
    stage: RefCell<Stage>,
    checkpoint: Arc<Checkpoint>,
    /// Its containers, once it lives.
    runtime: OnceCell<Rc<LinuxRuntime<NodeWorld>>>,
    /// What the kubelet sees: the life's state, once there is one.
    shown: watch::Sender<PodState>,
    dismissed: Rc<Notify>,
    /// Others show the pod's logs when this is gone.
    keeps_logs: Cell<bool>,
    /// Everybody who reads a log has a copy of it.
    readers: Arc<()>,
    /// It is a step, with a share of the node that others wait for.
    has_share: bool,
}

enum Stage {
    /// Nothing is known but that there is a pod.
    Waiting(Box<Waiting>),
    /// It lives.
    Living(
        LifecycleHandle,
        mpsc::UnboundedSender<Bundle>,
        Rc<LinuxRuntime<NodeWorld>>,
    ),
    /// There is nothing to live with.
    Broken,
}

struct Waiting {
    start: Start,
    places: PodDirs,
    forked: Processes,
    /// It was told to end before it began.
    stop: Option<Stop>,
}

impl SandboxPod {
    /// A pod that waits for its bundle.
    pub fn new(start: Start, places: PodDirs, forked: Processes) -> Self {
        Self {
            has_share: start.announces,
            logs: LogDir::new(&places.logs),
            checkpoint: Arc::new(Checkpoint::new(&places.disk)),
            stage: RefCell::new(Stage::Waiting(Box::new(Waiting {
                start,
                places,
                forked,
                stop: None,
            }))),
            runtime: OnceCell::new(),
            shown: watch::Sender::new(PodState::default()),
            dismissed: Rc::default(),
            keeps_logs: Cell::new(false),
            readers: Arc::default(),
        }
    }

    /// Waits until the kubelet needs this no more.
    pub fn dismissed(&self) -> impl Future<Output = ()> + 'static {
        let dismissed = self.dismissed.clone();
        async move { dismissed.notified().await }
    }

    /// Whether the pod's logs are to stay.
    pub fn keeps_logs(&self) -> bool {
        self.keeps_logs.get()
    }

    /// Writes the pod's checkpoint for the last time.
    pub fn save_for_good(&self) {
        let state = self.shown.subscribe();
        if let Err(error) = self.checkpoint.save(|| state.borrow().clone()) {
            tracing::warn!(%error, "cannot write the pod's checkpoint");
        }
        self.checkpoint.freeze();
    }

    /// Ends what still runs, at once.
    pub async fn end(&self) {
        let life = match &*self.stage.borrow() {
            Stage::Living(life, ..) => life.clone(),
            Stage::Waiting(_) | Stage::Broken => return,
        };
        life.stop(Stop {
            grace_seconds: 0,
            failure: None,
        });
        life.finished().await;
    }

    /// What runs the containers, once there is something.
    fn runtime(&self) -> Result<Rc<LinuxRuntime<NodeWorld>>, Problem> {
        match &*self.stage.borrow() {
            Stage::Living(_, _, runtime) => Ok(runtime.clone()),
            Stage::Waiting(_) | Stage::Broken => Err(Problem {
                reason: "NotFound".to_owned(),
                message: "the pod does not run".to_owned(),
            }),
        }
    }

    fn begin(&self, waiting: Waiting, bundle: Bundle) -> std::io::Result<Stage> {
        let Waiting {
            start,
            places,
            forked,
            stop,
        } = waiting;
        let world = NodeWorld::new(&start, &places, Puller::new(forked.puller)?);
        let stacking = start.stacking.clone();
        let (pod, looked_at) = (bundle.pod.clone(), places.clone());
        let runtime = LinuxRuntime::new(
            world,
            places,
            self.logs.clone(),
            forked.inner,
            forked.line,
            bundle.clone(),
            stacking,
        )?;
        let runtime = Rc::new(runtime);
        let _ = self.runtime.set(runtime.clone());
        let life = lifecycle::start(runtime.clone(), bundle);
        if let Some(stop) = stop {
            life.stop(stop);
        }
        let evicted = life.clone();
        tokio::task::spawn_local(async move {
            let problem = eviction::exceeded(&pod, &looked_at).await;
            evicted.stop(Stop {
                grace_seconds: 1,
                failure: Some(problem),
            });
        });
        let (mut state, shown) = (life.state(), self.shown.clone());
        tokio::task::spawn_local(async move {
            loop {
                let now = state.borrow_and_update().clone();
                shown.send_replace(now);
                if state.changed().await.is_err() {
                    return;
                }
            }
        });
        let saved = keep_checkpoint(Arc::clone(&self.checkpoint), life.state());
        tokio::task::spawn_local(saved);
        let watched = runtime.clone();
        tokio::task::spawn_local(async move {
            watched.inner_died().await;
            // The kubelet sees it and starts another sandbox, which goes on by the pod's policy.
            tracing::error!("the pod's inner process was killed");
            // In the host's process namespace what it has started lives on.
            let _ = linux::process::kill_all_below(Duration::from_secs(2));
            std::process::exit(1);
        });
        let (cut_off, abandoned) = (runtime.clone(), life.clone());
        tokio::task::spawn_local(async move {
            cut_off.network_lost().await;
            // The kubelet sees the sandbox end and starts another, as above.
            if abandoned.abandon().await {
                tracing::error!("the pod's sandbox ends: its network is gone");
                let _ = linux::process::kill_all_below(Duration::from_secs(2));
                std::process::exit(1);
            }
        });
        // One after the other: bringing volumes up to date takes a while, and the newest bundle must win.
        let (bundles, mut given) = mpsc::unbounded_channel::<Bundle>();
        let (teller, lived) = (life.clone(), runtime.clone());
        tokio::task::spawn_local(async move {
            let mut again = None;
            loop {
                let next = given.recv();
                let next = match again.take() {
                    None => next.await,
                    Some(same) => {
                        let next = tokio::time::timeout(RETRY, next).await;
                        next.unwrap_or(Some(same))
                    }
                };
                let Some(bundle) = next else { return };
                let (done, all) = runtime.put_bundle(bundle.clone()).await;
                teller.put_bundle(done);
                again = (!all).then_some(bundle);
            }
        });
        Ok(Stage::Living(life, bundles, lived))
    }
}

/// Writes the checkpoint whenever it is out of date. The disk may be slow, so another thread does it.
async fn keep_checkpoint(checkpoint: Arc<Checkpoint>, mut state: watch::Receiver<PodState>) {
    loop {
        let is_outdated = checkpoint.is_outdated_by(&state.borrow_and_update());
        let saved = match is_outdated {
            true => {
                let (checkpoint, newest) = (Arc::clone(&checkpoint), state.clone());
                let save = move || checkpoint.save(|| newest.borrow().clone());
                let saved = tokio::task::spawn_blocking(save).await;
                saved.map_err(std::io::Error::other).flatten()
            }
            false => Ok(()),
        };
        let changed = match saved {
            Ok(()) => state.changed().await,
            Err(error) => {
                tracing::warn!(%error, "cannot write the pod's checkpoint yet");
                let changed = tokio::time::timeout(RETRY, state.changed()).await;
                changed.unwrap_or(Ok(()))
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

impl SandboxService for SandboxPod {
    fn put_bundle(&self, bundle: Bundle) {
        let stage = self.stage.replace(Stage::Broken);
        let stage = match stage {
            Stage::Waiting(waiting) => self.begin(*waiting, bundle).unwrap_or_else(|error| {
                tracing::error!(%error, "cannot speak with the inner process");
                self.dismissed.notify_one();
                Stage::Broken
            }),
            living @ Stage::Living(..) => {
                if let Stage::Living(_, bundles, _) = &living {
                    let _ = bundles.send(bundle);
                }
                living
            }
            Stage::Broken => Stage::Broken,
        };
        self.stage.replace(stage);
    }

    fn stop(&self, stop: Stop) {
        match &mut *self.stage.borrow_mut() {
            Stage::Waiting(waiting) => waiting.stop = Some(stop),
            Stage::Living(life, ..) => life.stop(stop),
            Stage::Broken => {}
        }
    }

    fn dismiss(&self) {
        self.dismissed.notify_one();
    }

    fn retire(&self) {
        self.keeps_logs.set(true);
        let has_share = self.has_share;
        let (dismissed, readers) = (self.dismissed.clone(), Arc::downgrade(&self.readers));
        tokio::task::spawn_local(async move {
            // Nobody begins to read any more: the kubelet does it itself.
            let nobody_reads = async {
                while readers.strong_count() > 1 {
                    tokio::time::sleep(READERS_PAUSE).await;
                }
            };
            match has_share {
                true => _ = tokio::time::timeout(READERS_PATIENCE, nobody_reads).await,
                false => nobody_reads.await,
            }
            dismissed.notify_one();
        });
    }

    fn state(&self) -> watch::Receiver<PodState> {
        self.shown.subscribe()
    }

    async fn logs(&self, query: LogQuery) -> Result<LogByteStream, Problem> {
        let log = self.logs.read(&query).await?;
        let reader = self.readers.clone();
        Ok(log.inspect(move |_| _ = &reader).boxed())
    }

    async fn exec(&self, query: ExecQuery, client: FrameReader) -> Result<FrameStream, Problem> {
        let session = self.runtime()?.open_exec(query).await?;
        Ok(session.run(client))
    }

    async fn attach(&self, query: AttachQuery, client: FrameReader) -> Result<FrameStream, Problem> {
        let session = self.runtime()?.open_attach(&query)?;
        Ok(session.run(client))
    }

    async fn port_forward(&self, port: u16) -> Result<TcpStream, Problem> {
        self.runtime()?.open_port(port).await
    }

    async fn usage(&self) -> Option<PodUsage> {
        let runtime = self.runtime.get().cloned()?;
        runtime.usage().await
    }
}
