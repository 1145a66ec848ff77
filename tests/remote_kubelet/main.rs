//! A kubelet whose sandboxes run on another host: `remote-kubelet NODE HOST`, called as the workload of a cluster.
//!
//! It registers the Node `NODE`, and starts the sandbox of each of its pods on `HOST` with `srun … coracle internal pod-job`. Sandboxes
//! connect to it over mutual TLS; the two hosts share nothing else that the kubelet uses. It prints the log of each running pod, and
//! the output of a command in it, as a user would get them through the kubelet's API.
//!
//! A second one on the same host adopts the sandboxes of the first: it has the same port and certificates, from a file in the user's
//! home directory, and finds the sandboxes by Slurm's list of steps.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "this is a program of the tests, whose output they read"
)]

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt};
use kubelet::{
    Kubelet, LaunchRequest, Launcher, LauncherKind, NetworkStateSender, NodeCapacity, NodeConfig,
    NodeKey, PodManager, PodRecords, SandboxEnd, SandboxHandle, SandboxState,
};
use kubelet_api::{ExecOptions, LogOptions, LogStream, PodSource, RequestedStreams, SessionOutput};
use pod_protocol::connection::{
    KubeletEndpoint, LogByteStream, TransportIdentity, TransportListener,
};
use pod_protocol::{LogQuery, PodState, RequestError, SandboxId};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

const SERVER_NAME: &str = "kubelet";

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1);
    let (node, host) = (args.next().unwrap(), args.next().unwrap());
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .unwrap();
    let addresses = linux::address::host_addresses().unwrap();
    let earlier = std::fs::read(state_file()).ok();
    let earlier: Option<KubeletState> = earlier.map(|text| serde_json::from_slice(&text).unwrap());
    let port = earlier.as_ref().map_or(0, |state| state.port);
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
    let listener = listener.await.unwrap();
    let KubeletState {
        port,
        kubelet,
        sandbox,
    } = earlier.unwrap_or_else(|| new_state(listener.local_addr().unwrap().port()));
    let launcher = Arc::new(RemoteLauncher {
        host,
        endpoint: KubeletEndpoint::Tls {
            addresses: addresses
                .iter()
                .map(|ip| SocketAddr::new(*ip, port))
                .collect(),
            server_name: SERVER_NAME.to_owned(),
            identity: sandbox,
        },
        launched: Mutex::default(),
    });
    let pods = Arc::new(PodManager::new());
    let (registered, _) = tokio::sync::oneshot::channel();
    let mut terminated = signal(SignalKind::terminate()).unwrap();
    let kubelet = Kubelet {
        client: kube::Client::try_default().await.unwrap(),
        config: config(&node, addresses),
        launcher,
        listener: TransportListener::tls(listener, &kubelet).unwrap(),
        network: NetworkStateSender::default(),
        pod_manager: Arc::clone(&pods),
    };
    let ran = kubelet::run(kubelet, registered, async move {
        terminated.recv().await;
        Duration::from_secs(10)
    });
    tokio::select! {
        ended = ran => ended.unwrap(),
        () = show_pods(pods) => {}
    }
}

fn config(node: &str, addresses: Vec<IpAddr>) -> NodeConfig {
    NodeConfig {
        name: node.to_owned(),
        internal_ips: addresses,
        hostname: node.to_owned(),
        kubelet_port: 1,
        capacity: NodeCapacity {
            cpus: 4,
            memory_bytes: 1 << 30,
            ephemeral_storage_bytes: 1 << 30,
            pods: 10,
            extended: BTreeMap::new(),
        },
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        kubelet_version: "v1.37.1".to_owned(),
        host_dirs: None,
        node_key: NodeKey([7; 32]),
        launcher: LauncherKind::Fork,
        pod_cidrs: vec![],
        cluster_dns: vec![],
        cluster_domain: "cluster.local".to_owned(),
        stream_idle_timeout: Duration::from_secs(60),
        processes: None,
        node_paths: vec![],
    }
}

/// What a kubelet leaves to the next one.
#[derive(Serialize, Deserialize)]
struct KubeletState {
    port: u16,
    kubelet: TransportIdentity,
    sandbox: TransportIdentity,
}

fn state_file() -> PathBuf {
    PathBuf::from(std::env::var_os("HOME").unwrap()).join("remote-kubelet.state")
}

fn new_state(port: u16) -> KubeletState {
    let (kubelet, sandbox) = identities();
    let state = KubeletState {
        port,
        kubelet,
        sandbox,
    };
    let mut private = std::fs::OpenOptions::new();
    let private = private.write(true).create_new(true).mode(0o600);
    let mut file = private.open(state_file()).unwrap();
    file.write_all(&serde_json::to_vec(&state).unwrap())
        .unwrap();
    state
}

/// The certificates of the kubelet and of its sandboxes.
fn identities() -> (TransportIdentity, TransportIdentity) {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::new(vec![]).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let identity = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let leaf = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        TransportIdentity {
            ca_pem: ca_pem.clone(),
            cert_pem: leaf.signed_by(&key, &issuer).unwrap().pem(),
            key_pem: key.serialize_pem(),
        }
    };
    (identity(SERVER_NAME), identity("sandbox"))
}

/// Prints the log of each running pod, and the output of a command in it. Never returns.
async fn show_pods(pods: Arc<PodManager>) {
    let mut shown = HashSet::new();
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        for pod in pods.pods() {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
            // An adopted pod may be Running before its sandbox has connected.
            if phase.as_deref() == Some("Running")
                && !shown.contains(&uid)
                && let Some(log) = log(&pods, &uid).await
                && let Some(output) = exec(&pods, &uid).await
            {
                println!("log: {log}\nexec: {output}");
                shown.insert(uid);
            }
        }
    }
}

async fn log(pods: &PodManager, uid: &str) -> Option<String> {
    let options = LogOptions {
        container: "c".to_owned(),
        previous: false,
        follow: false,
        tail_lines: None,
        since: None,
        timestamps: false,
        limit_bytes: None,
        stream: LogStream::All,
    };
    let log = pods.logs(uid, options).await.ok()?;
    let bytes: Vec<_> = log.try_collect().await.ok()?;
    Some(String::from_utf8_lossy(&bytes.concat()).trim().to_owned())
}

async fn exec(pods: &PodManager, uid: &str) -> Option<String> {
    let options = ExecOptions {
        container: "c".to_owned(),
        command: ["sh", "-c", "echo by exec on $(hostname)"]
            .map(str::to_owned)
            .into(),
        streams: RequestedStreams {
            stdin: false,
            stdout: true,
            stderr: false,
            tty: false,
        },
    };
    let mut session = pods.exec(uid, options).await.ok()?;
    let mut output = Vec::new();
    while let Some(SessionOutput::Stdout(bytes)) = session.output.next().await {
        output.extend_from_slice(&bytes);
    }
    Some(String::from_utf8_lossy(&output).trim().to_owned())
}

/// Starts sandboxes on another host.
struct RemoteLauncher {
    host: String,
    endpoint: KubeletEndpoint,
    /// The uids of pods that were launched.
    launched: Mutex<HashSet<String>>,
}

const ID_PREFIX: &str = "step-named/";

/// The id that the launcher chooses for the sandbox of a pod.
fn sandbox_id(uid: &str) -> SandboxId {
    SandboxId::new(format!("{ID_PREFIX}{uid}"))
}

/// The id of the pod's step, if it runs.
async fn find_step(uid: &str) -> std::io::Result<Option<String>> {
    let mut squeue = Command::new("squeue");
    let listed = squeue
        .args(["--steps", "-h", "-o", "%i %j"])
        .output()
        .await?;
    if !listed.status.success() {
        return Err(std::io::Error::other("squeue failed"));
    }
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut steps = listed.lines().filter_map(|line| line.split_once(' '));
    Ok(steps
        .find(|(_, name)| *name == uid)
        .map(|(step, _)| step.to_owned()))
}

impl Launcher for RemoteLauncher {
    fn launch(&self, request: LaunchRequest) -> SandboxHandle {
        let id = sandbox_id(&request.uid);
        let (handle, control) = SandboxHandle::new(Some(id.clone()), SandboxState::Starting);
        let is_first = self.launched.lock().unwrap().insert(request.uid.clone());
        assert!(is_first, "a second launch of pod {}", request.uid);
        let config = json!({
            "uid": request.uid, "id": id, "host_pid": request.host_pid, "kubelet": self.endpoint,
            "token": request.token, "pod_cidr": "100.64.9.0/24",
        });
        let mut command = Command::new("srun");
        command
            .args(["--overlap", "-N1", "-n1", "-w", &self.host])
            .arg(format!("--job-name={}", request.uid))
            .args(["coracle", "internal", "pod-job"])
            .stdin(Stdio::piped());
        tokio::spawn(async move {
            let mut srun = command.spawn().unwrap();
            let mut input = srun.stdin.take().unwrap();
            input
                .write_all(format!("{config}\n").as_bytes())
                .await
                .unwrap();
            control.set_state(SandboxState::Running);
            let status = loop {
                tokio::select! {
                    status = srun.wait() => break status.unwrap(),
                    () = control.kill_requested() => srun.start_kill().unwrap(),
                }
            };
            println!("step ended: {status}");
            let end = SandboxEnd::Exited(status.to_string());
            control.set_state(SandboxState::Ended(end));
        });
        handle
    }

    fn find(&self, uid: &str) -> BoxFuture<'_, std::io::Result<Option<SandboxHandle>>> {
        let uid = uid.to_owned();
        async move {
            let Some(step) = find_step(&uid).await? else {
                return Ok(None);
            };
            println!("found: {uid}");
            let id = sandbox_id(&uid);
            let (handle, control) = SandboxHandle::new(Some(id), SandboxState::Running);
            tokio::spawn(async move {
                while find_step(&uid).await.is_ok_and(|step| step.is_some()) {
                    tokio::select! {
                        () = tokio::time::sleep(Duration::from_millis(500)) => {}
                        () = control.kill_requested() => {
                            let killed = Command::new("scancel").args(["-s", "KILL", &step]).status();
                            killed.await.unwrap();
                        }
                    }
                }
                println!("found step ended");
                let end = SandboxEnd::Exited("unknown".to_owned());
                control.set_state(SandboxState::Ended(end));
            });
            Ok(Some(handle))
        }
        .boxed()
    }

    fn adopt(&self, id: &SandboxId) -> BoxFuture<'_, std::io::Result<Option<SandboxHandle>>> {
        let uid = id.as_str().strip_prefix(ID_PREFIX).unwrap().to_owned();
        async move { self.find(&uid).await }.boxed()
    }

    fn records(&self) -> Arc<dyn PodRecords> {
        Arc::new(NoRecords)
    }

    fn remove_local_volume(&self, _: &str) -> BoxFuture<'_, std::io::Result<()>> {
        futures::future::ready(Ok(())).boxed()
    }
}

/// The sandboxes of this kubelet leave nothing that it could read.
struct NoRecords;

impl PodRecords for NoRecords {
    fn uids(&self) -> BoxFuture<'_, Vec<String>> {
        futures::future::ready(vec![]).boxed()
    }

    fn checkpoint(&self, _: &str) -> BoxFuture<'_, Option<PodState>> {
        futures::future::ready(None).boxed()
    }

    fn logs(
        &self,
        _: &str,
        _: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogByteStream, RequestError>>> {
        futures::future::ready(None).boxed()
    }

    fn remove(&self, _: &str) -> BoxFuture<'_, std::io::Result<()>> {
        futures::future::ready(Ok(())).boxed()
    }
}
