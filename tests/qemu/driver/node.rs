//! A node whose agent is the driver: a hub, and sandboxes that connect to the driver.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Stdio;
use std::time::Duration;

use futures::stream::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use linux::cgroup::Cgroup;
use pod_protocol::connection::{ConnectionError, SandboxClient, accept};
use pod_protocol::usage::ContainerUsage;
use pod_protocol::{
    Bundle, ContainerInput, LogQuery, NodeFacts, PodState, SandboxHello, SandboxWelcome, Stop,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::process::{Child, Command};

const PROGRAM: &str = "/bin/coracle";
const DIR: &str = "/tmp/node";
const STORE: &str = "/images";
/// Emulated machines are slow, and the real one may be busy.
const TIMEOUT: Duration = Duration::from_secs(40);

/// A node with a running hub.
pub struct DriverNode {
    /// The parent of the pods' cgroups.
    pub groups: Cgroup,
    listener: UnixListener,
    _hub: Child,
}

/// How a pod's sandbox is started.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum LaunchMode {
    /// As a child of the agent, with a cgroup for the pod.
    Cgroup,
    /// As a child of an agent that has no cgroups for pods.
    NoCgroup,
    /// As a step of the job, in the step's cgroup.
    Step,
}

/// A pod that was started.
pub struct RunningPod {
    /// Its cgroup, if it has one.
    pub group: Cgroup,
    client: SandboxClient,
    states: Pin<Box<dyn Stream<Item = Result<PodState, ConnectionError>>>>,
    process: Child,
}

fn text(error: impl Display) -> String {
    error.to_string()
}

impl DriverNode {
    /// Starts the hub.
    pub async fn start(groups: Cgroup) -> Result<Self, String> {
        let dir = PathBuf::from(DIR);
        let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(text)?;
        let listener = UnixListener::bind(dir.join("kubelet.sock")).map_err(text)?;
        let line = json!({"dir": dir, "pod_cidr": "100.64.0.0/24"});
        let (driver_end, hub_end) = linux::packet::pair().map_err(text)?;
        let mut command = Command::new(PROGRAM);
        command
            .args(["internal", "hub"])
            .stdin(Stdio::from(hub_end));
        let mut hub = command.stdout(Stdio::piped()).spawn().map_err(text)?;
        linux::packet::send(&driver_end, 0, line.to_string().as_bytes(), &[]).map_err(text)?;
        let output = hub.stdout.take().ok_or("the hub has no output")?;
        let mut answer = String::new();
        let read = BufReader::new(output).read_line(&mut answer).await;
        read.map_err(text)?;
        match answer.trim() {
            "ready" => Ok(Self {
                groups,
                listener,
                _hub: hub,
            }),
            problem => Err(format!("the hub failed: {problem:?}")),
        }
    }

    /// Waits for the connection of this pod's sandbox. Rejects sandboxes of failed checks.
    async fn accept_sandbox(&self, name: &str) -> SandboxClient {
        loop {
            let Ok((stream, _)) = self.listener.accept().await else {
                continue;
            };
            let welcome = |hello: &SandboxHello| (hello.uid == name).then(SandboxWelcome::default);
            let hello = accept(stream, welcome).await;
            if let Ok((_, client)) = hello {
                return client;
            }
        }
    }

    /// The cgroup that Slurm would create for a step.
    pub fn step(&self) -> Cgroup {
        let job = self.groups.path().parent().unwrap_or(self.groups.path());
        Cgroup::at(job).child("step")
    }

    /// Runs a pod called `name`.
    pub async fn run(
        &self,
        name: &str,
        spec: Value,
        mode: LaunchMode,
    ) -> Result<RunningPod, String> {
        let groups = match mode {
            LaunchMode::Cgroup | LaunchMode::NoCgroup => self.groups.clone(),
            LaunchMode::Step => self.step().child("coracle-pods"),
        };
        let group = groups.child(&format!("pod-{name}"));
        let line = json!({"uid": name, "token": "t", "kubelet": {"Unix": format!("{DIR}/kubelet.sock")},
            "host_ips": ["127.0.0.1"], "host_pid": false, "is_step": mode == LaunchMode::Step,
            "open_files": 1024, "node_dir": DIR, "store": STORE, "snapshotter": "Overlay",
            "pods_cgroup": (mode == LaunchMode::Cgroup).then(|| self.groups.path())});
        let mut command = Command::new("sh");
        if mode == LaunchMode::Step {
            self.step().create().map_err(text)?;
            let script = r#"echo 0 > "$1" && shift && exec "$@""#;
            let procs = self.step().path().join("cgroup.procs");
            command.args(["-c", script, "sh"]).arg(procs).arg(PROGRAM);
        } else {
            command = Command::new(PROGRAM);
        }
        command.args(["internal", "sandbox"]).stdout(Stdio::null());
        let process = start(command, &line).await?;
        let connected = tokio::time::timeout(TIMEOUT, self.accept_sandbox(name)).await;
        let client = connected.map_err(|_| "the sandbox does not connect")?;
        let bundle = bundle(name, spec)?;
        client.put_bundle(&bundle).await.map_err(text)?;
        let states = Box::pin(client.states().await.map_err(text)?);
        Ok(RunningPod {
            group,
            client,
            states,
            process,
        })
    }
}

impl RunningPod {
    /// Waits until `wanted` returns a value for the pod's state; returns that value.
    pub async fn until<T>(
        &mut self,
        condition: &str,
        wanted: impl Fn(&PodState) -> Option<T>,
    ) -> Result<T, String> {
        let mut last = PodState::default();
        let found = async {
            while let Some(state) = self.states.next().await {
                last = state.map_err(text)?;
                if let Some(found) = wanted(&last) {
                    return Ok(found);
                }
            }
            Err("the sandbox has closed the connection".to_owned())
        };
        match tokio::time::timeout(TIMEOUT, found).await {
            Ok(found) => found,
            Err(_) => {
                let states = last.containers.iter().map(|status| &status.state);
                let states: Vec<_> = states.collect();
                Err(format!("timed out waiting for {condition}: {states:?}"))
            }
        }
    }

    /// Waits until a container has terminated; returns reason and exit code.
    pub async fn terminated(&mut self, container: &str) -> Result<(String, i32), String> {
        let end = |state: &PodState| {
            let terminated = state_of(state, container)?.terminated.clone()?;
            Some((terminated.reason.unwrap_or_default(), terminated.exit_code))
        };
        self.until(&format!("the exit of {container}"), end).await
    }

    /// Waits until a container runs, and has passed its startup probe.
    pub async fn running(&mut self, container: &str) -> Result<(), String> {
        let runs = |state: &PodState| {
            let status = status_of(state, container)?;
            (status.started == Some(true)).then_some(())
        };
        self.until(&format!("the start of {container}"), runs).await
    }

    /// Whether a container runs, according to the latest state.
    pub async fn still_runs(&mut self, container: &str) -> Result<bool, String> {
        let states = self.client.states().await.map_err(text)?;
        let now = Box::pin(states).next().await.ok_or("no state")?;
        let now = now.map_err(text)?;
        Ok(state_of(&now, container).is_some_and(|state| state.running.is_some()))
    }

    /// Sends a changed pod to the sandbox.
    pub async fn change(&self, name: &str, spec: Value) -> Result<(), String> {
        let bundle = bundle(name, spec)?;
        self.client.put_bundle(&bundle).await.map_err(text)
    }

    /// A container's log.
    pub async fn log(&self, container: &str) -> Result<String, String> {
        let query = LogQuery {
            container: container.to_owned(),
            ..LogQuery::default()
        };
        let bytes = self.client.logs(&query).await.map_err(text)?;
        let bytes: Vec<_> = bytes.try_collect().await.map_err(text)?;
        Ok(String::from_utf8_lossy(&bytes.concat()).into_owned())
    }

    /// The resource usage of a container, as reported by the sandbox.
    pub async fn usage(&self, container: &str) -> Result<ContainerUsage, String> {
        let usage = self.client.usage().await.map_err(text)?;
        let mut all = usage.containers.into_iter();
        let found = all.find(|usage| usage.name == container);
        found.ok_or_else(|| format!("no usage of {container}"))
    }

    /// Stops the pod with this grace period.
    pub async fn stop(&self, grace_seconds: i64) -> Result<(), String> {
        let stop = Stop {
            grace_seconds,
            failure: None,
        };
        self.client.stop(&stop).await.map_err(text)
    }

    /// Stops the pod, and dismisses its sandbox.
    pub async fn end(mut self) -> Result<(), String> {
        self.stop(0).await?;
        self.until("the end of the pod", |state| state.finished.then_some(()))
            .await?;
        self.client.dismiss().await.map_err(text)?;
        let waited = tokio::time::timeout(TIMEOUT, self.process.wait()).await;
        waited
            .map_err(|_| "the sandbox does not exit")?
            .map_err(text)?;
        Ok(())
    }

    /// Kills the sandbox.
    pub async fn kill(mut self) -> Result<(), String> {
        self.process.kill().await.map_err(text)
    }
}

fn status_of<'a>(state: &'a PodState, container: &str) -> Option<&'a ContainerStatus> {
    state
        .containers
        .iter()
        .find(|status| status.name == container)
}

fn state_of<'a>(state: &'a PodState, container: &str) -> Option<&'a ContainerState> {
    status_of(state, container)?.state.as_ref()
}

async fn start(mut command: Command, line: &Value) -> Result<Child, String> {
    let mut child = command
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(text)?;
    let mut input = child.stdin.take().ok_or("no pipe")?;
    let written = input.write_all(format!("{line}\n").as_bytes()).await;
    written.map_err(text)?;
    Ok(child)
}

fn bundle(name: &str, spec: Value) -> Result<Bundle, String> {
    let pod =
        json!({"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": spec});
    let pod: Pod = serde_json::from_value(pod).map_err(text)?;
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    Ok(Bundle {
        containers: containers
            .map(|container| (container.name.clone(), ContainerInput::default()))
            .collect(),
        pod,
        volumes: BTreeMap::new(),
        pull_credentials: Vec::new(),
        node: NodeFacts {
            name: "vm".to_owned(),
            cluster_dns: Vec::new(),
            cluster_domain: "cluster.local".to_owned(),
            ..NodeFacts::default()
        },
        previous_statuses: Vec::new(),
    })
}
