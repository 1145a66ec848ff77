//! For tests: an API server with one pod, and sandboxes that do as they are told by the test.

use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, Stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body as HttpBody, Frame};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::client::Body;
use pod_protocol::connection::{LogBytes, accept, serve};
use pod_protocol::streams::{Frames, Words};
use pod_protocol::{
    AttachQuery, Bundle, ExecQuery, Hello, LogQuery, PodState, Problem, Stop, VERSION,
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tower::service_fn;

use super::bundles::Offer;
use super::launch::{Handle, Launch, LaunchError, Launcher};
use super::switchboard::Caller;
use super::worker::Seen;
use super::{KnownPods, NodeKey, Shared};
use crate::events::Recorder;
use crate::resolve::Resolver;
use crate::{Capacity, NodeConfig};

/// Everything that was asked of the simulated API server, and what it holds.
pub(super) struct Api {
    pub pod: Value,
    pub deleted: bool,
    /// Refuses everything while this is set.
    pub away: bool,
    /// Every status as it was after a patch.
    pub statuses: Vec<Value>,
    pub events: Vec<Value>,
    /// Every path that was asked for.
    pub asked: Vec<String>,
    pub node: Value,
    seen: Option<watch::Sender<Seen>>,
    version: u64,
}

impl Api {
    fn answer(&mut self, method: &Method, path: &str, body: Value) -> (StatusCode, Value) {
        let pod_path = "/api/v1/namespaces/n/pods/p";
        self.asked.push(path.to_owned());
        if self.away {
            return (StatusCode::SERVICE_UNAVAILABLE, status(503, "away"));
        }
        match (method, path) {
            (&Method::PATCH, path) if path == format!("{pod_path}/status") && !self.deleted => {
                assert_eq!(body["metadata"]["uid"], self.pod["metadata"]["uid"]);
                merge(&mut self.pod["status"], &body["status"]);
                self.statuses.push(self.pod["status"].clone());
                self.show(false);
                (StatusCode::OK, self.pod.clone())
            }
            (&Method::DELETE, path) if path == pod_path && !self.deleted => {
                assert_eq!(body["gracePeriodSeconds"], 0);
                self.deleted = true;
                self.show(true);
                (StatusCode::OK, self.pod.clone())
            }
            (&Method::PATCH, path) if path.starts_with("/api/v1/namespaces/n/events/") => (
                StatusCode::OK,
                json!({ "metadata": {}, "involvedObject": {} }),
            ),
            (&Method::POST, "/api/v1/namespaces/n/events") => {
                self.events.push(body.clone());
                (StatusCode::CREATED, body)
            }
            (&Method::GET, "/api/v1/pods") => {
                let items: Vec<_> = (!self.deleted)
                    .then(|| self.pod.clone())
                    .into_iter()
                    .collect();
                let list = json!({ "metadata": { "resourceVersion": "100" }, "items": items });
                (StatusCode::OK, list)
            }
            (&Method::GET, "/apis/node.k8s.io/v1/runtimeclasses/theirs") => {
                let class = json!({ "metadata": { "name": "theirs" }, "handler": "kata" });
                (StatusCode::OK, class)
            }
            (&Method::GET, "/apis/node.k8s.io/v1/runtimeclasses/ours") => {
                let class = json!({ "metadata": { "name": "ours" }, "handler": "coracle" });
                (StatusCode::OK, class)
            }
            (&Method::GET, "/api/v1/nodes/node1") => (StatusCode::OK, self.node.clone()),
            _ => (StatusCode::NOT_FOUND, status(404, "not found")),
        }
    }

    /// Shows the pod to who watches it.
    fn show(&mut self, gone: bool) {
        self.version += 1;
        self.pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if let Some(seen) = &self.seen {
            let pod = Arc::new(self.pod());
            seen.send_replace(Seen {
                pod,
                gone,
                resize: None,
            });
        }
    }

    pub(super) fn pod(&self) -> Pod {
        serde_json::from_value(self.pod.clone()).unwrap()
    }
}

fn status(code: u16, message: &str) -> Value {
    json!({ "kind": "Status", "status": "Failure", "code": code, "message": message, "reason": "" })
}

/// As the API server merges what a kubelet sends.
fn merge(status: &mut Value, patch: &Value) {
    for (key, value) in patch.as_object().unwrap() {
        let mut list = value.clone();
        match (key.as_str(), list.as_array_mut()) {
            ("conditions", Some(new)) => {
                for condition in &mut *new {
                    let fields = condition.as_object_mut().unwrap();
                    fields.retain(|_, value| !value.is_null());
                }
                let old = status[key].as_array().cloned().unwrap_or_default();
                let kept = old
                    .into_iter()
                    .filter(|old| new.iter().all(|new| new["type"] != old["type"]));
                let all: Vec<_> = kept.chain(new.iter().cloned()).collect();
                status[key] = json!(all);
            }
            ("podIPs" | "hostIPs", Some(new)) => {
                assert_eq!(new.remove(0), json!({ "$patch": "replace" }));
                status[key] = list;
            }
            _ => status[key] = list,
        }
    }
}

/// A world with one pod in it.
pub(super) struct World {
    pub api: Arc<Mutex<Api>>,
    pub sandboxes: Arc<Sandboxes>,
    pub shared: Arc<Shared>,
    pub seen: watch::Receiver<Seen>,
    pub connections: Option<mpsc::UnboundedReceiver<Caller>>,
    pub offers: watch::Sender<Option<Arc<Offer>>>,
    pub shutdown: watch::Sender<Option<tokio::time::Instant>>,
    changed: Arc<Notify>,
    _node_dir: tempfile::TempDir,
}

impl World {
    /// Runs within a `LocalSet`.
    pub(super) fn with(pod: Value) -> Self {
        let changed = Arc::new(Notify::new());
        let (show, seen) = watch::channel(Seen {
            pod: Arc::new(serde_json::from_value(pod.clone()).unwrap()),
            gone: false,
            resize: None,
        });
        let api = Arc::new(Mutex::new(Api {
            pod,
            deleted: false,
            away: false,
            statuses: vec![],
            events: vec![],
            asked: vec![],
            node: json!({ "metadata": { "name": "node1" } }),
            seen: Some(show),
            version: 100,
        }));
        let client = client(Arc::clone(&api), Arc::clone(&changed));
        let (connected, connections) = mpsc::unbounded_channel();
        let (diallers, dialling) = mpsc::unbounded_channel();
        tokio::task::spawn_local(connect_all(dialling, connected));
        let sandboxes = Arc::new(Sandboxes {
            all: Mutex::default(),
            diallers,
            changed: Arc::clone(&changed),
            broken: Mutex::new(false),
            checkpoint: Mutex::default(),
        });
        let node_dir = tempfile::tempdir().unwrap();
        let config = config(node_dir.path());
        let (recorder, recording) = Recorder::new(client.clone(), "node1".to_owned());
        tokio::task::spawn_local(recording);
        let launcher: Arc<dyn Launcher> = Arc::<Sandboxes>::clone(&sandboxes);
        let shared = Arc::new(Shared {
            resolver: Arc::new(Resolver::new(client.clone(), &config)),
            client,
            config,
            launcher,
            known: Arc::new(KnownPods::new()),
            recorder,
            node: watch::channel(None::<Arc<Node>>).1,
            evicted: watch::Sender::default(),
            room: Arc::new(Semaphore::new(1)),
            host_ips: vec!["10.0.0.1".parse().unwrap()],
        });
        Self {
            api,
            sandboxes,
            shared,
            seen,
            connections: Some(connections),
            offers: watch::channel(None).0,
            shutdown: watch::channel(None).0,
            changed,
            _node_dir: node_dir,
        }
    }

    /// Changes the pod as a user or a controller would.
    pub(super) fn edit(&self, edit: impl FnOnce(&mut Value)) {
        let mut api = self.api.lock().unwrap();
        edit(&mut api.pod);
        api.show(false);
    }

    /// Removes the pod at once, as `kubectl delete --force` does.
    pub(super) fn vanish(&self) {
        let mut api = self.api.lock().unwrap();
        api.deleted = true;
        api.show(true);
    }

    /// Resolves the pod.
    pub(super) fn resolve(&self) {
        self.offer(true);
    }

    /// Resolves the pod, with all of its volumes or without.
    pub(super) fn offer(&self, whole: bool) {
        let bundle = Bundle {
            pod: self.api.lock().unwrap().pod(),
            containers: Default::default(),
            volumes: Default::default(),
            pull_credentials: vec![],
            node: Default::default(),
            before: vec![],
        };
        self.offers
            .send_replace(Some(Arc::new(Offer { bundle, whole })));
    }

    /// Waits until the world is as `is` wants it.
    pub(super) async fn until<T>(&self, mut is: impl FnMut(&Self) -> Option<T>) -> T {
        let wait = async {
            loop {
                if let Some(value) = is(self) {
                    return value;
                }
                let pause = std::time::Duration::from_millis(10);
                let _ = tokio::time::timeout(pause, self.changed.notified()).await;
            }
        };
        let patience = std::time::Duration::from_secs(600);
        tokio::time::timeout(patience, wait)
            .await
            .expect("the world did not come to that")
    }

    pub(super) async fn phase(&self, wanted: &str) {
        self.until(|world| {
            let api = world.api.lock().unwrap();
            (api.pod["status"]["phase"] == wanted).then_some(())
        })
        .await;
    }

    /// The `number`th sandbox, once it was launched.
    pub(super) async fn sandbox(&self, number: usize) -> Arc<Sandbox> {
        self.until(|world| world.sandboxes.all.lock().unwrap().get(number).cloned())
            .await
    }
}

fn client(api: Arc<Mutex<Api>>, changed: Arc<Notify>) -> Client {
    let service = service_fn(move |request: Request<Body>| {
        let (api, changed) = (Arc::clone(&api), Arc::clone(&changed));
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let path = parts.uri.path();
            let watches = parts
                .uri
                .query()
                .is_some_and(|query| query.contains("watch=true"));
            if watches && path == "/api/v1/pods" {
                // Tests that watch show what they have at the start.
                return Ok(Response::new(StreamBody::new(silence()).boxed_unsync()));
            }
            let (code, answer) = api.lock().unwrap().answer(&parts.method, path, body);
            changed.notify_waiters();
            let answer = Response::builder()
                .status(code)
                .body(whole(&answer).boxed_unsync())?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(answer)
        }
    });
    Client::new(service, "default")
}

fn whole(answer: &Value) -> impl HttpBody<Data = Bytes, Error = std::io::Error> + use<> {
    Full::new(Bytes::from(answer.to_string())).map_err(std::io::Error::other)
}

/// A watch in which nothing happens.
fn silence() -> impl Stream<Item = Result<Frame<Bytes>, std::io::Error>> {
    futures::stream::pending()
}

fn config(node_dir: &Path) -> NodeConfig {
    NodeConfig {
        name: "node1".to_owned(),
        internal_ips: vec!["10.0.0.1".parse().unwrap()],
        hostname: "node1".to_owned(),
        kubelet_port: 1,
        capacity: Capacity {
            pods: 2,
            ..Default::default()
        },
        labels: Default::default(),
        annotations: Default::default(),
        kubelet_version: String::new(),
        scratch_dir: "/tmp".into(),
        node_dir: node_dir.to_owned(),
        node_key: NodeKey([1; 32]),
        way: Default::default(),
        pod_cidrs: vec![],
        cluster_dns: vec![],
        cluster_domain: "cluster.local".to_owned(),
        stream_idle_timeout: std::time::Duration::from_secs(4 * 60 * 60),
        members: None,
    }
}

/// Starts simulated sandboxes.
pub(super) struct Sandboxes {
    pub all: Mutex<Vec<Arc<Sandbox>>>,
    /// Launching fails while this is set.
    pub broken: Mutex<bool>,
    /// What a sandbox has written down.
    pub checkpoint: Mutex<Option<PodState>>,
    diallers: mpsc::UnboundedSender<Arc<Sandbox>>,
    changed: Arc<Notify>,
}

impl Launcher for Sandboxes {
    fn launch(&self, launch: Launch) -> BoxFuture<'_, Result<Box<dyn Handle>, LaunchError>> {
        let started = if *self.broken.lock().unwrap() {
            Err(LaunchError("no more processes".into()))
        } else {
            let sandbox = self.start();
            assert_eq!(launch.token, NodeKey([1; 32]).token(&launch.uid));
            Ok(Box::new(Process(sandbox)) as Box<dyn Handle>)
        };
        futures::future::ready(started).boxed()
    }

    fn find(&self, uid: &str) -> Option<Box<dyn Handle>> {
        let all = self.all.lock().unwrap();
        let mut living = all.iter().filter(|sandbox| !*sandbox.gone.borrow());
        let found = living.next().filter(|_| uid == "u")?;
        Some(Box::new(Process(Arc::clone(found))))
    }

    fn checkpoint(&self, _uid: &str) -> BoxFuture<'_, Option<PodState>> {
        let checkpoint = self.checkpoint.lock().unwrap().clone();
        futures::future::ready(checkpoint).boxed()
    }
}

impl Sandboxes {
    /// Starts a sandbox that dials at once; as the launcher, or as one that outlived its kubelet.
    pub(super) fn start(&self) -> Arc<Sandbox> {
        let sandbox = self.start_silent();
        self.dial(&sandbox);
        sandbox
    }

    /// Starts a sandbox that has not dialled yet.
    pub(super) fn start_silent(&self) -> Arc<Sandbox> {
        let sandbox = Arc::new(Sandbox {
            id: i32::try_from(self.all.lock().unwrap().len()).unwrap(),
            bundles: Mutex::default(),
            stops: Mutex::default(),
            dismissed: Mutex::default(),
            retired: Mutex::default(),
            killed: Mutex::default(),
            state: watch::channel(PodState::default()).0,
            gone: watch::Sender::new(false),
            hang_up: Notify::new(),
            changed: Arc::clone(&self.changed),
        });
        self.all.lock().unwrap().push(Arc::clone(&sandbox));
        self.changed.notify_waiters();
        sandbox
    }

    /// Lets a sandbox dial, for the first time or again.
    pub(super) fn dial(&self, sandbox: &Arc<Sandbox>) {
        // Launchers run anywhere, simulated sandboxes on one thread.
        let _ = self.diallers.send(Arc::clone(sandbox));
    }
}

/// Connects each sandbox that dials.
async fn connect_all(
    mut diallers: mpsc::UnboundedReceiver<Arc<Sandbox>>,
    connected: mpsc::UnboundedSender<Caller>,
) {
    while let Some(sandbox) = diallers.recv().await {
        let (here, there) = tokio::io::duplex(1 << 16);
        let hello = Hello {
            version: VERSION,
            token: String::new(),
            uid: "u".to_owned(),
        };
        let caller = Arc::clone(&sandbox);
        tokio::task::spawn_local(async move {
            let gone = Arc::clone(&sandbox);
            let done = async move { gone.hang_up.notified().await };
            serve(there, &hello, Rc::new(Serving(sandbox)), done).await;
        });
        let (hello, client) = accept(here, |_| Some("p".to_owned())).await.unwrap();
        let _ = connected.send(Caller {
            uid: hello.uid,
            client,
            process: Some(Box::new(Process(caller))),
        });
    }
}

/// A simulated sandbox, as tests see it.
pub(super) struct Sandbox {
    id: i32,
    pub bundles: Mutex<Vec<Bundle>>,
    pub stops: Mutex<Vec<Stop>>,
    pub dismissed: Mutex<bool>,
    /// It was let go, and its logs stayed.
    pub retired: Mutex<bool>,
    pub killed: Mutex<bool>,
    state: watch::Sender<PodState>,
    gone: watch::Sender<bool>,
    hang_up: Notify,
    changed: Arc<Notify>,
}

impl Sandbox {
    /// Tells the kubelet a new state.
    pub(super) fn say(&self, state: PodState) {
        self.state.send_replace(state);
    }

    /// Dies, with its connection.
    pub(super) fn die(&self) {
        self.break_line();
        self.gone.send_replace(true);
        self.changed.notify_waiters();
    }

    /// Loses its connection and lives on.
    pub(super) fn break_line(&self) {
        self.hang_up.notify_one();
    }
}

struct Serving(Arc<Sandbox>);

impl pod_protocol::connection::SandboxService for Serving {
    fn put_bundle(&self, bundle: Bundle) {
        self.0.bundles.lock().unwrap().push(bundle);
        self.0.changed.notify_waiters();
    }

    fn stop(&self, stop: Stop) {
        self.0.stops.lock().unwrap().push(stop);
        self.0.changed.notify_waiters();
    }

    fn retire(&self) {
        *self.0.retired.lock().unwrap() = true;
        self.0.die();
    }

    fn dismiss(&self) {
        *self.0.dismissed.lock().unwrap() = true;
        self.0.die();
    }

    fn state(&self) -> watch::Receiver<PodState> {
        self.0.state.subscribe()
    }

    async fn logs(&self, _: LogQuery) -> Result<LogBytes, Problem> {
        Ok(Box::pin(futures::stream::empty()))
    }

    async fn exec(&self, _: ExecQuery, _: Words) -> Result<Frames, Problem> {
        Err(refused())
    }

    async fn attach(&self, _: AttachQuery, _: Words) -> Result<Frames, Problem> {
        Err(refused())
    }

    async fn port_forward(&self, _: u16) -> Result<TcpStream, Problem> {
        Err(refused())
    }
}

/// Nothing runs in a simulated sandbox.
fn refused() -> Problem {
    Problem {
        reason: "BadRequest".to_owned(),
        message: "nothing runs here".to_owned(),
    }
}

struct Process(Arc<Sandbox>);

impl Handle for Process {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let mut gone = self.0.gone.subscribe();
            let _ = gone.wait_for(|gone| *gone).await;
            "exit code 1".to_owned()
        }
        .boxed()
    }

    fn id(&self) -> Option<i32> {
        Some(self.0.id)
    }

    fn kill(&mut self) {
        *self.0.killed.lock().unwrap() = true;
        self.0.die();
    }
}
