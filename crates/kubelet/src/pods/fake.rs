//! For tests: a fake API server with one pod, and fake sandboxes that the test controls.

use std::collections::BTreeMap;
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
use pod_protocol::connection::{LogByteStream, accept, serve};
use pod_protocol::streams::{FrameReader, FrameStream};
use pod_protocol::{
    AttachQuery, Bundle, ExecQuery, HostFacts, LogQuery, PROTOCOL_VERSION, PodState, RequestError,
    SandboxCredential, SandboxHello, SandboxId, SandboxWelcome, Stop,
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tower::service_fn;

use super::bundle::ResolvedBundle;
use super::sandbox_auth::{Authenticated, SandboxAuthenticator};
use super::sandbox_listener::IncomingSandbox;
use super::worker::PodUpdate;
use super::{
    LaunchRequest, Launcher, NetworkStateSender, NodeKey, PodManager, PodRecords, SandboxEnd,
    SandboxHandle, SandboxState, Shared,
};
use crate::events::EventRecorder;
use crate::resolve::Resolver;
use crate::{HostDirs, NodeCapacity, NodeConfig};

/// The state of the fake API server, and the requests that it got.
pub(super) struct FakeApiServer {
    pub pod: Value,
    pub deleted: bool,
    /// Responds with 503 while this is set.
    pub unavailable: bool,
    /// Every status as it was after a patch.
    pub statuses: Vec<Value>,
    pub events: Vec<Value>,
    /// The paths of all requests.
    pub requested_paths: Vec<String>,
    pub node: Value,
    updates: Option<watch::Sender<PodUpdate>>,
    version: u64,
}

impl FakeApiServer {
    fn respond(&mut self, method: &Method, path: &str, body: Value) -> (StatusCode, Value) {
        let pod_path = "/api/v1/namespaces/n/pods/p";
        self.requested_paths.push(path.to_owned());
        if self.unavailable {
            return (StatusCode::SERVICE_UNAVAILABLE, status(503, "unavailable"));
        }
        match (method, path) {
            (&Method::PATCH, path) if path == format!("{pod_path}/status") && !self.deleted => {
                assert_eq!(body["metadata"]["uid"], self.pod["metadata"]["uid"]);
                merge(&mut self.pod["status"], &body["status"]);
                self.statuses.push(self.pod["status"].clone());
                self.notify(false);
                (StatusCode::OK, self.pod.clone())
            }
            (&Method::DELETE, path) if path == pod_path && !self.deleted => {
                assert_eq!(body["gracePeriodSeconds"], 0);
                self.deleted = true;
                self.notify(true);
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
            (&Method::GET, "/apis/node.k8s.io/v1/runtimeclasses/foreign") => {
                let class = json!({ "metadata": { "name": "foreign" }, "handler": "kata" });
                (StatusCode::OK, class)
            }
            (&Method::GET, "/apis/node.k8s.io/v1/runtimeclasses/own") => {
                let class = json!({ "metadata": { "name": "own" }, "handler": "coracle" });
                (StatusCode::OK, class)
            }
            (&Method::GET, "/api/v1/nodes/node1") => (StatusCode::OK, self.node.clone()),
            _ => (StatusCode::NOT_FOUND, status(404, "not found")),
        }
    }

    /// Sends the pod to its worker.
    fn notify(&mut self, deleted: bool) {
        self.version += 1;
        self.pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if let Some(updates) = &self.updates {
            let pod = Arc::new(self.pod());
            updates.send_replace(PodUpdate {
                pod,
                deleted,
                pending_resize: None,
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

/// A strategic merge of statuses, like the API server's.
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

/// A node with one pod, a fake API server and a fake launcher.
pub(super) struct Fixture {
    pub api: Arc<Mutex<FakeApiServer>>,
    pub launcher: Arc<FakeLauncher>,
    pub shared: Arc<Shared>,
    pub updates: watch::Receiver<PodUpdate>,
    pub connections: Option<mpsc::UnboundedReceiver<IncomingSandbox>>,
    pub bundles: watch::Sender<Option<Arc<ResolvedBundle>>>,
    pub shutdown: watch::Sender<Option<tokio::time::Instant>>,
    changed: Arc<Notify>,
}

impl Fixture {
    /// Must be called within a `LocalSet`.
    pub(super) fn with_pod(pod: Value) -> Self {
        let changed = Arc::new(Notify::new());
        let (sender, updates) = watch::channel(PodUpdate {
            pod: Arc::new(serde_json::from_value(pod.clone()).unwrap()),
            deleted: false,
            pending_resize: None,
        });
        let api = Arc::new(Mutex::new(FakeApiServer {
            pod,
            deleted: false,
            unavailable: false,
            statuses: vec![],
            events: vec![],
            requested_paths: vec![],
            node: json!({ "metadata": { "name": "node1" } }),
            updates: Some(sender),
            version: 100,
        }));
        let client = client(Arc::clone(&api), Arc::clone(&changed));
        let (connected, connections) = mpsc::unbounded_channel();
        let (connecting, connecting_receiver) = mpsc::unbounded_channel();
        tokio::task::spawn_local(connect_all(connecting_receiver, connected));
        let fake_launcher = Arc::new(FakeLauncher {
            sandboxes: Mutex::default(),
            connecting,
            changed: Arc::clone(&changed),
            fails: Mutex::new(false),
            cannot_find: Mutex::new(false),
            queued: Mutex::new(None),
            records: Arc::default(),
        });
        let config = config();
        let (recorder, recording) = EventRecorder::new(client.clone(), "node1".to_owned());
        tokio::task::spawn_local(recording);
        let launcher: Arc<dyn Launcher> = Arc::<FakeLauncher>::clone(&fake_launcher);
        let shared = Arc::new(Shared {
            resolver: Arc::new(Resolver::new(client.clone(), &config)),
            client,
            config,
            launcher,
            pod_manager: Arc::new(PodManager::new()),
            recorder,
            node: watch::channel(None::<Arc<Node>>).1,
            evictions: watch::Sender::default(),
            status_updates: Arc::new(Semaphore::new(1)),
            authenticator: Arc::new(SandboxAuthenticator::new(&NodeKey([1; 32]))),
            network: NetworkStateSender::default(),
        });
        Self {
            api,
            launcher: fake_launcher,
            shared,
            updates,
            connections: Some(connections),
            bundles: watch::channel(None).0,
            shutdown: watch::channel(None).0,
            changed,
        }
    }

    /// Changes the pod object.
    pub(super) fn edit_pod(&self, edit: impl FnOnce(&mut Value)) {
        let mut api = self.api.lock().unwrap();
        edit(&mut api.pod);
        api.notify(false);
    }

    /// Deletes the pod object at once, as `kubectl delete --force` does.
    pub(super) fn force_delete(&self) {
        let mut api = self.api.lock().unwrap();
        api.deleted = true;
        api.notify(true);
    }

    /// Publishes a complete bundle.
    pub(super) fn resolve(&self) {
        self.publish_bundle(true);
    }

    /// Publishes a bundle, with all volumes or not.
    pub(super) fn publish_bundle(&self, complete: bool) {
        self.publish(complete, Default::default());
    }

    /// Publishes a bundle that is larger than a sandbox accepts.
    pub(super) fn publish_oversized_bundle(&self) {
        let volume = serde_json::Value::String("x".repeat(65 << 20));
        self.publish(true, [("v".to_owned(), volume)].into());
    }

    fn publish(&self, complete: bool, volumes: BTreeMap<String, serde_json::Value>) {
        let bundle = Bundle {
            pod: self.api.lock().unwrap().pod(),
            containers: Default::default(),
            volumes,
            pull_credentials: vec![],
            node: Default::default(),
            previous_statuses: vec![],
        };
        self.bundles
            .send_replace(Some(Arc::new(ResolvedBundle { bundle, complete })));
    }

    /// Waits until `condition` returns a value.
    pub(super) async fn wait_for<T>(&self, mut condition: impl FnMut(&Self) -> Option<T>) -> T {
        let wait = async {
            loop {
                if let Some(value) = condition(self) {
                    return value;
                }
                let pause = std::time::Duration::from_millis(10);
                let _ = tokio::time::timeout(pause, self.changed.notified()).await;
            }
        };
        let timeout = std::time::Duration::from_secs(600);
        tokio::time::timeout(timeout, wait)
            .await
            .expect("timed out")
    }

    pub(super) async fn wait_for_phase(&self, phase: &str) {
        self.wait_for(|fixture| {
            let api = fixture.api.lock().unwrap();
            (api.pod["status"]["phase"] == phase).then_some(())
        })
        .await;
    }

    /// Waits for the sandbox with this index.
    pub(super) async fn sandbox(&self, index: usize) -> Arc<FakeSandbox> {
        self.wait_for(|fixture| fixture.launcher.started().get(index).cloned())
            .await
    }
}

fn client(api: Arc<Mutex<FakeApiServer>>, changed: Arc<Notify>) -> Client {
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
                // The list has the pod; the watch has no events.
                return Ok(Response::new(StreamBody::new(no_events()).boxed_unsync()));
            }
            let (code, response) = api.lock().unwrap().respond(&parts.method, path, body);
            changed.notify_waiters();
            let response = Response::builder()
                .status(code)
                .body(body_of(&response).boxed_unsync())?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(response)
        }
    });
    Client::new(service, "default")
}

fn body_of(response: &Value) -> impl HttpBody<Data = Bytes, Error = std::io::Error> + use<> {
    Full::new(Bytes::from(response.to_string())).map_err(std::io::Error::other)
}

fn no_events() -> impl Stream<Item = Result<Frame<Bytes>, std::io::Error>> {
    futures::stream::pending()
}

fn config() -> NodeConfig {
    NodeConfig {
        name: "node1".to_owned(),
        internal_ips: vec!["10.0.0.1".parse().unwrap()],
        hostname: "node1".to_owned(),
        kubelet_port: 1,
        capacity: NodeCapacity {
            pods: 2,
            ..Default::default()
        },
        labels: Default::default(),
        annotations: Default::default(),
        kubelet_version: String::new(),
        host_dirs: Some(HostDirs {
            scratch: "/tmp".into(),
            local_volumes: "/tmp/local".into(),
        }),
        node_key: NodeKey([1; 32]),
        launcher: Default::default(),
        pod_cidrs: vec![],
        cluster_dns: vec![],
        cluster_domain: "cluster.local".to_owned(),
        stream_idle_timeout: std::time::Duration::from_secs(4 * 60 * 60),
        processes: None,
        node_paths: vec![],
    }
}

/// Starts fake sandboxes.
pub(super) struct FakeLauncher {
    sandboxes: Mutex<Vec<Arc<FakeSandbox>>>,
    /// Launching fails while this is set.
    pub fails: Mutex<bool>,
    /// The launcher cannot tell whether there is a sandbox while this is set.
    pub cannot_find: Mutex<bool>,
    /// The state of new sandboxes, instead of running at once. The test sets later states.
    pub queued: Mutex<Option<SandboxState>>,
    pub records: Arc<FakeRecords>,
    connecting: mpsc::UnboundedSender<Arc<FakeSandbox>>,
    changed: Arc<Notify>,
}

/// Logs and checkpoints of fake sandboxes.
#[derive(Default)]
pub(super) struct FakeRecords {
    pub checkpoint: Mutex<Option<PodState>>,
    pub uids: Mutex<Vec<String>>,
    pub removed: Mutex<Vec<String>>,
}

impl PodRecords for FakeRecords {
    fn uids(&self) -> BoxFuture<'_, Vec<String>> {
        let uids = self.uids.lock().unwrap().clone();
        futures::future::ready(uids).boxed()
    }

    fn checkpoint(&self, _uid: &str) -> BoxFuture<'_, Option<PodState>> {
        let checkpoint = self.checkpoint.lock().unwrap().clone();
        futures::future::ready(checkpoint).boxed()
    }

    fn logs(
        &self,
        _uid: &str,
        _query: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogByteStream, RequestError>>> {
        futures::future::ready(None).boxed()
    }

    fn remove(&self, uid: &str) -> BoxFuture<'_, std::io::Result<()>> {
        self.removed.lock().unwrap().push(uid.to_owned());
        futures::future::ready(Ok(())).boxed()
    }
}

impl Launcher for FakeLauncher {
    fn launch(&self, request: LaunchRequest) -> SandboxHandle {
        assert!(!request.token.is_empty());
        if *self.fails.lock().unwrap() {
            let end = SandboxEnd::NotStarted("no more processes".to_owned());
            return handle(None, SandboxState::Starting, |control| async move {
                control.set_state(SandboxState::Ended(end));
            });
        }
        let queued = self.queued.lock().unwrap().clone();
        let sandbox = match queued {
            None => self.start(),
            Some(state) => {
                let sandbox = self.start_unconnected();
                sandbox.launcher_state.send_replace(state);
                sandbox
            }
        };
        follow(&sandbox)
    }

    fn find(&self, uid: &str) -> BoxFuture<'_, std::io::Result<Option<SandboxHandle>>> {
        if *self.cannot_find.lock().unwrap() {
            let error = std::io::Error::other("too many open files");
            return futures::future::ready(Err(error)).boxed();
        }
        let sandboxes = self.started();
        let mut running = sandboxes.iter().filter(|sandbox| sandbox.is_alive());
        let found = running.next().filter(|_| uid == "u").map(follow);
        futures::future::ready(Ok(found)).boxed()
    }

    fn adopt(&self, id: &SandboxId) -> BoxFuture<'_, std::io::Result<Option<SandboxHandle>>> {
        let sandboxes = self.started();
        let found = sandboxes.iter().find(|sandbox| sandbox.id() == *id);
        futures::future::ready(Ok(found.map(follow))).boxed()
    }

    fn records(&self) -> Arc<dyn PodRecords> {
        Arc::<FakeRecords>::clone(&self.records)
    }

    fn remove_local_volume(&self, _name: &str) -> BoxFuture<'_, std::io::Result<()>> {
        futures::future::ready(Ok(())).boxed()
    }
}

/// A handle whose launcher runs `task`.
fn handle<F: Future<Output = ()> + Send + 'static>(
    id: Option<SandboxId>,
    state: SandboxState,
    task: impl FnOnce(super::SandboxControl) -> F,
) -> SandboxHandle {
    let (handle, control) = SandboxHandle::new(id, state);
    tokio::spawn(task(control));
    handle
}

/// A handle of a fake sandbox.
fn follow(sandbox: &Arc<FakeSandbox>) -> SandboxHandle {
    let sandbox = Arc::clone(sandbox);
    let state = sandbox.launcher_state.borrow().clone();
    handle(Some(sandbox.id()), state, |control| async move {
        let mut states = sandbox.launcher_state.subscribe();
        loop {
            let state = states.borrow_and_update().clone();
            let has_ended = matches!(state, SandboxState::Ended(_));
            control.set_state(state);
            if has_ended {
                return;
            }
            tokio::select! {
                _ = states.changed() => {}
                () = control.kill_requested() => sandbox.kill(),
            }
        }
    })
}

impl FakeLauncher {
    /// All sandboxes that were ever started.
    pub(super) fn started(&self) -> Vec<Arc<FakeSandbox>> {
        self.sandboxes.lock().unwrap().clone()
    }

    /// Starts a sandbox that connects at once: as the launcher, or as one that outlived its kubelet.
    pub(super) fn start(&self) -> Arc<FakeSandbox> {
        let sandbox = self.start_unconnected();
        self.connect(&sandbox);
        sandbox
    }

    /// Starts a sandbox that does not connect yet.
    pub(super) fn start_unconnected(&self) -> Arc<FakeSandbox> {
        let sandbox = Arc::new(FakeSandbox {
            id: i32::try_from(self.started().len()).unwrap(),
            bundles: Mutex::default(),
            stops: Mutex::default(),
            dismissed: Mutex::default(),
            retired: Mutex::default(),
            killed: Mutex::default(),
            state: watch::channel(PodState {
                host: host(),
                ..PodState::default()
            })
            .0,
            launcher_state: watch::Sender::new(SandboxState::Running),
            ignores_kill: Mutex::new(false),
            disconnect: Notify::new(),
            changed: Arc::clone(&self.changed),
        });
        self.sandboxes.lock().unwrap().push(Arc::clone(&sandbox));
        self.changed.notify_waiters();
        sandbox
    }

    /// Connects a sandbox, for the first time or again.
    pub(super) fn connect(&self, sandbox: &Arc<FakeSandbox>) {
        // Launchers run on any thread, fake sandboxes on that of the test.
        let _ = self.connecting.send(Arc::clone(sandbox));
    }
}

async fn connect_all(
    mut connecting: mpsc::UnboundedReceiver<Arc<FakeSandbox>>,
    connected: mpsc::UnboundedSender<IncomingSandbox>,
) {
    while let Some(sandbox) = connecting.recv().await {
        let (here, there) = tokio::io::duplex(1 << 16);
        let mut hello = SandboxHello {
            version: PROTOCOL_VERSION,
            uid: "u".to_owned(),
            id: sandbox.id(),
            credential: SandboxCredential::Key(String::new()),
        };
        tokio::task::spawn_local(async move {
            let served = Arc::clone(&sandbox);
            let done = async move { served.disconnect.notified().await };
            serve(there, &mut hello, Rc::new(FakeService(sandbox)), done).await;
        });
        let welcome = |_: &SandboxHello| Some(SandboxWelcome::default());
        let (hello, client) = accept(here, welcome).await.unwrap();
        let _ = connected.send(IncomingSandbox {
            hello,
            client,
            authenticated: Authenticated::default(),
        });
    }
}

/// The facts that fake sandboxes report.
pub(super) fn host() -> HostFacts {
    HostFacts {
        host_ips: vec!["10.0.0.1".parse().unwrap()],
        started_at: Some("2026-01-01T00:00:00Z".parse().unwrap()),
        snapshotter: "overlay".to_owned(),
        has_cgroups: false,
        open_files: 1024,
        processes: None,
    }
}

/// A fake sandbox, with the requests that it got.
pub(super) struct FakeSandbox {
    id: i32,
    pub bundles: Mutex<Vec<Bundle>>,
    pub stops: Mutex<Vec<Stop>>,
    pub dismissed: Mutex<bool>,
    pub retired: Mutex<bool>,
    pub killed: Mutex<bool>,
    state: watch::Sender<PodState>,
    /// Its state as its launcher reports it.
    pub launcher_state: watch::Sender<SandboxState>,
    /// It does not end when it is killed, like a process that is blocked in the kernel.
    pub ignores_kill: Mutex<bool>,
    disconnect: Notify,
    changed: Arc<Notify>,
}

impl FakeSandbox {
    /// Reports a new state to the kubelet.
    pub(super) fn report(&self, state: PodState) {
        self.state.send_replace(state);
    }

    fn id(&self) -> SandboxId {
        SandboxId::new(self.id.to_string())
    }

    fn is_alive(&self) -> bool {
        !matches!(*self.launcher_state.borrow(), SandboxState::Ended(_))
    }

    fn kill(&self) {
        *self.killed.lock().unwrap() = true;
        if !*self.ignores_kill.lock().unwrap() {
            self.exit();
        }
    }

    /// Exits, which ends its connection.
    pub(super) fn exit(&self) {
        self.disconnect();
        let end = SandboxEnd::Exited("exit code 1".to_owned());
        self.launcher_state.send_replace(SandboxState::Ended(end));
        self.changed.notify_waiters();
    }

    /// Loses its connection, but keeps running.
    pub(super) fn disconnect(&self) {
        self.disconnect.notify_one();
    }
}

struct FakeService(Arc<FakeSandbox>);

impl pod_protocol::connection::SandboxService for FakeService {
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
        self.0.exit();
    }

    fn dismiss(&self) {
        *self.0.dismissed.lock().unwrap() = true;
        self.0.exit();
    }

    fn state(&self) -> watch::Receiver<PodState> {
        self.0.state.subscribe()
    }

    async fn logs(&self, _: LogQuery) -> Result<LogByteStream, RequestError> {
        Ok(Box::pin(futures::stream::empty()))
    }

    async fn exec(&self, _: ExecQuery, _: FrameReader) -> Result<FrameStream, RequestError> {
        Err(nothing_runs())
    }

    async fn attach(&self, _: AttachQuery, _: FrameReader) -> Result<FrameStream, RequestError> {
        Err(nothing_runs())
    }

    async fn port_forward(&self, _: u16) -> Result<TcpStream, RequestError> {
        Err(nothing_runs())
    }
}

fn nothing_runs() -> RequestError {
    RequestError::bad_request("no container is running")
}
