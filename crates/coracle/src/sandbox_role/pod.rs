//! The pod, as its kubelet speaks with it: the life, once there is a bundle, and the logs.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::process::Pid;
use sandbox::connection::{LogBytes, Pod};
use sandbox::life::{self, LifeHandle};
use sandbox::logs::LogDir;
use sandbox::protocol::{Bundle, LogQuery, PodState, Problem, Stop};
use sandbox::runtime::{LinuxRuntime, Places};
use tokio::sync::{Notify, mpsc, watch};

use super::world::NodeWorld;
use super::{Start, eviction};

/// One pod.
pub struct SandboxPod {
    logs: LogDir,
    stage: RefCell<Stage>,
    /// What the kubelet sees: the life's state, once there is one.
    shown: watch::Sender<PodState>,
    dismissed: Rc<Notify>,
}

enum Stage {
    /// Nothing is known but that there is a pod.
    Waiting(Box<Waiting>),
    /// It lives.
    Living(LifeHandle, mpsc::UnboundedSender<Bundle>),
    /// There is nothing to live with.
    Broken,
}

struct Waiting {
    start: Start,
    places: Places,
    inner: Pid,
    socket: OwnedFd,
    /// It was told to end before it began.
    stop: Option<Stop>,
}

impl SandboxPod {
    /// A pod that waits for its bundle.
    pub fn new(start: Start, places: Places, inner: Pid, socket: OwnedFd) -> Self {
        Self {
            logs: LogDir::new(&places.logs),
            stage: RefCell::new(Stage::Waiting(Box::new(Waiting {
                start,
                places,
                inner,
                socket,
                stop: None,
            }))),
            shown: watch::Sender::new(PodState::default()),
            dismissed: Rc::default(),
        }
    }

    /// Waits until the kubelet needs this no more.
    pub fn dismissed(&self) -> impl Future<Output = ()> + 'static {
        let dismissed = self.dismissed.clone();
        async move { dismissed.notified().await }
    }

    /// Ends what still runs, at once.
    pub async fn end(&self) {
        let life = match &*self.stage.borrow() {
            Stage::Living(life, _) => life.clone(),
            Stage::Waiting(_) | Stage::Broken => return,
        };
        life.stop(Stop {
            grace_seconds: 0,
            failure: None,
        });
        life.finished().await;
    }

    fn begin(&self, waiting: Waiting, bundle: Bundle) -> std::io::Result<Stage> {
        let Waiting {
            start,
            places,
            inner,
            socket,
            stop,
        } = waiting;
        let world = NodeWorld::new(&start, &places);
        let (pod, looked_at) = (bundle.pod.clone(), places.clone());
        let runtime = LinuxRuntime::new(
            world,
            places,
            self.logs.clone(),
            inner,
            socket,
            bundle.clone(),
        )?;
        let runtime = Rc::new(runtime);
        let life = life::start(runtime.clone(), bundle);
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
        let watched = runtime.clone();
        tokio::task::spawn_local(async move {
            watched.inner_died().await;
            // The kubelet sees it and starts another sandbox, which goes on by the pod's policy.
            tracing::error!("the pod's inner process was killed");
            std::process::exit(1);
        });
        // One after the other: bringing volumes up to date takes a while, and the newest bundle must win.
        let (bundles, mut given) = mpsc::unbounded_channel::<Bundle>();
        let teller = life.clone();
        tokio::task::spawn_local(async move {
            while let Some(bundle) = given.recv().await {
                runtime.put_bundle(bundle.clone()).await;
                teller.put_bundle(bundle);
            }
        });
        Ok(Stage::Living(life, bundles))
    }
}

impl Pod for SandboxPod {
    fn put_bundle(&self, bundle: Bundle) {
        let stage = self.stage.replace(Stage::Broken);
        let stage = match stage {
            Stage::Waiting(waiting) => self.begin(*waiting, bundle).unwrap_or_else(|error| {
                tracing::error!(%error, "cannot speak with the inner process");
                self.dismissed.notify_one();
                Stage::Broken
            }),
            Stage::Living(life, bundles) => {
                let _ = bundles.send(bundle);
                Stage::Living(life, bundles)
            }
            Stage::Broken => Stage::Broken,
        };
        self.stage.replace(stage);
    }

    fn stop(&self, stop: Stop) {
        match &mut *self.stage.borrow_mut() {
            Stage::Waiting(waiting) => waiting.stop = Some(stop),
            Stage::Living(life, _) => life.stop(stop),
            Stage::Broken => {}
        }
    }

    fn dismiss(&self) {
        self.dismissed.notify_one();
    }

    fn state(&self) -> watch::Receiver<PodState> {
        self.shown.subscribe()
    }

    async fn logs(&self, query: LogQuery) -> Result<LogBytes, Problem> {
        self.logs.read(&query).await
    }
}
