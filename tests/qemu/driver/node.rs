//! A node without an agent: a hub, and sandboxes that dial us.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Stdio;
use std::time::Duration;

use futures::stream::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use linux::cgroup::Group;
use pod_protocol::connection::{ConnectionError, SandboxClient, accept};
use pod_protocol::usage::ContainerUsage;
use pod_protocol::{Bundle, ContainerInput, LogQuery, NodeFacts, PodState, Stop};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::process::{Child, Command};

const PROGRAM: &str = "/bin/coracle";
const DIR: &str = "/tmp/node";
const STORE: &str = "/images";
/// Emulated machines are slow, and the real one may be busy.
const PATIENCE: Duration = Duration::from_secs(40);

/// The node.
pub struct Node {
    /// Where the groups of pods are.
    pub groups: Group,
    listener: UnixListener,
    _hub: Child,
}

/// How a pod's sandbox is started.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// As a child of the agent, which has groups for pods.
    Grouped,
    /// As a child of an agent that has none.
    Plain,
    /// As a step of the job, in a group of its own.
    Step,
}

/// A pod that was started.
pub struct Running {
    /// Its control group, if it was given one.
    pub group: Group,
    client: SandboxClient,
    states: Pin<Box<dyn Stream<Item = Result<PodState, ConnectionError>>>>,
    process: Child,
}

fn text(error: impl Display) -> String {
    error.to_string()
}

impl Node {
    /// Starts the hub.
    pub async fn start(groups: Group) -> Result<Self, String> {
        let dir = PathBuf::from(DIR);
        let made = std::fs::DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(text)?;
        let listener = UnixListener::bind(dir.join("kubelet.sock")).map_err(text)?;
        let line = json!({"dir": dir, "socket": dir.join("hub.sock"), "range": "100.64.0.0/24", "mark": "CORACLE_DRIVER=1"});
        let (ours, theirs) = linux::packet::pair().map_err(text)?;
        let mut command = Command::new(PROGRAM);
        command.args(["internal", "hub"]).stdin(Stdio::from(theirs));
        let mut hub = command.stdout(Stdio::piped()).spawn().map_err(text)?;
        linux::packet::send(&ours, 0, line.to_string().as_bytes(), &[]).map_err(text)?;
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
            problem => Err(format!("the hub says {problem:?}")),
        }
    }

    /// The sandbox of this pod, when it has dialled. One of a check that failed may dial too, and is turned away.
    async fn caller(&self, name: &str) -> SandboxClient {
        loop {
            let Ok((stream, _)) = self.listener.accept().await else {
                continue;
            };
            let known = |uid: &String| uid == name;
            let hello = accept(stream, |hello| Some(hello.uid.clone()).filter(known)).await;
            if let Ok((_, client)) = hello {
                return client;
            }
        }
    }

    /// The group that Slurm would have made for a step.
    pub fn step(&self) -> Group {
        let job = self.groups.path().parent().unwrap_or(self.groups.path());
        Group::at(job).below("step")
    }

    /// Runs a pod called `name`.
    pub async fn run(&self, name: &str, spec: Value, way: Way) -> Result<Running, String> {
        let groups = match way {
            Way::Grouped | Way::Plain => self.groups.clone(),
            Way::Step => self.step().below("coracle-pods"),
        };
        let group = groups.below(&format!("pod-{name}"));
        let line = json!({"uid": name, "token": "t", "host_pid": false, "announces": way == Way::Step,
            "open_files": 1024, "node_dir": DIR, "store": STORE, "stacking": "Overlay",
            "groups": (way == Way::Grouped).then(|| self.groups.path())});
        let mut command = Command::new("sh");
        if way == Way::Step {
            self.step().make().map_err(text)?;
            let script = r#"echo 0 > "$1" && shift && exec "$@""#;
            let procs = self.step().path().join("cgroup.procs");
            command.args(["-c", script, "sh"]).arg(procs).arg(PROGRAM);
        } else {
            command = Command::new(PROGRAM);
        }
        command.args(["internal", "sandbox"]).stdout(Stdio::null());
        let process = start(command, &line).await?;
        let dialled = tokio::time::timeout(PATIENCE, self.caller(name)).await;
        let client = dialled.map_err(|_| "the sandbox does not dial")?;
        let bundle = bundle(name, spec)?;
        client.put_bundle(&bundle).await.map_err(text)?;
        let states = Box::pin(client.states().await.map_err(text)?);
        Ok(Running {
            group,
            client,
            states,
            process,
        })
    }
}

impl Running {
    /// Waits until the pod's state is as `wanted` says; what that finds in it.
    pub async fn until<T>(
        &mut self,
        what: &str,
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
            Err("the sandbox is gone".to_owned())
        };
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(found) => found,
            Err(_) => {
                let states = last.containers.iter().map(|status| &status.state);
                let states: Vec<_> = states.collect();
                Err(format!("waited in vain for {what}: {states:?}"))
            }
        }
    }

    /// Waits for a container's end: the reason, and the exit code.
    pub async fn ended(&mut self, container: &str) -> Result<(String, i32), String> {
        let end = |state: &PodState| {
            let ended = state_of(state, container)?.terminated.clone()?;
            Some((ended.reason.unwrap_or_default(), ended.exit_code))
        };
        self.until(&format!("the end of {container}"), end).await
    }

    /// Waits until a container runs, and has passed its startup probe.
    pub async fn running(&mut self, container: &str) -> Result<(), String> {
        let runs = |state: &PodState| {
            let status = status_of(state, container)?;
            (status.started == Some(true)).then_some(())
        };
        self.until(&format!("the start of {container}"), runs).await
    }

    /// Whether a container runs now, by the newest state there is.
    pub async fn still_runs(&mut self, container: &str) -> Result<bool, String> {
        let states = self.client.states().await.map_err(text)?;
        let now = Box::pin(states).next().await.ok_or("no state")?;
        let now = now.map_err(text)?;
        Ok(state_of(&now, container).is_some_and(|state| state.running.is_some()))
    }

    /// Says that the pod is to be another: what can change while it runs.
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

    /// What the sandbox says of a container.
    pub async fn usage(&self, container: &str) -> Result<ContainerUsage, String> {
        let usage = self.client.usage().await.map_err(text)?;
        let mut all = usage.containers.into_iter();
        let found = all.find(|usage| usage.name == container);
        found.ok_or_else(|| format!("{container} is not measured"))
    }

    /// Ends the pod with all that it has, after at most so many seconds.
    pub async fn stop(&self, grace_seconds: i64) -> Result<(), String> {
        let stop = Stop {
            grace_seconds,
            failure: None,
        };
        self.client.stop(&stop).await.map_err(text)
    }

    /// Ends the pod and its sandbox.
    pub async fn end(mut self) -> Result<(), String> {
        self.stop(0).await?;
        self.until("its end", |state| state.finished.then_some(()))
            .await?;
        self.client.dismiss().await.map_err(text)?;
        let waited = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        waited
            .map_err(|_| "the sandbox does not end")?
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
            host_ips: vec!["127.0.0.1".to_owned()],
            cluster_dns: Vec::new(),
            cluster_domain: "cluster.local".to_owned(),
            ..NodeFacts::default()
        },
        previous_statuses: Vec::new(),
    })
}
