//! Manifests as a workload: applies them with kubectl, then waits.
//!
//! The workload ends when all Jobs and bare Pods have ended, with 1 if any of them failed. If there are only objects that never end
//! (a Deployment, a CronJob), the cluster runs until the Slurm job ends. The workload does not wait for objects that run nothing.

use console::{Failure, FailureCode, print_stderr};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::runtime::wait::{Condition, await_condition};
use kube::{Client, ResourceExt};
use kubelet_api::PodPhase;
use serde::Deserialize;
use tokio::process::Command;

use super::warning_events;
use super::workload::Manifests;

type Env = BTreeMap<&'static str, OsString>;

/// Custom resources can't be applied until the API server serves their new definition.
const APPLY_ATTEMPTS: u32 = 5;

/// Retry interval of watches.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// An object in kubectl's output.
#[derive(Debug, Clone, Deserialize)]
pub struct AppliedObject {
    kind: String,
    metadata: Metadata,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Metadata {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
}

/// Applies the manifests and waits for them. Returns the workload's exit code.
pub async fn run(manifests: &Manifests, env: &Env, client: Client) -> anyhow::Result<i32> {
    let text = match manifests {
        // Read it once, because applying may take several attempts.
        Manifests::Stdin => Some(read_stdin().await?),
        Manifests::File(_) | Manifests::Directory(_) => None,
    };
    let applied = apply(manifests, text.as_deref(), env).await?;
    let ending = applied.iter().filter(|object| object.ends());
    let mut waits: futures::stream::FuturesUnordered<_> = ending
        .map(|object| wait_for(object, client.clone()))
        .collect();
    let namespaces = applied
        .iter()
        .map(|object| object.metadata.namespace.clone())
        .collect();
    let warnings = warning_events::print_warnings(client.clone(), namespaces);
    if waits.is_empty() && applied.iter().any(AppliedObject::never_ends) {
        print_stderr(format_args!(
            "coracle: nothing in these manifests ends by itself; end the cluster with Ctrl-C or scancel"
        ));
        match warnings.await {}
    }
    let all_ended = async {
        let mut code = 0;
        while let Some((object, succeeded)) = waits.next().await {
            show_logs(&object, env, &client).await;
            print_stderr(format_args!(
                "coracle: {object} {}",
                if succeeded { "succeeded" } else { "failed" }
            ));
            if !succeeded {
                code = 1;
            }
        }
        code
    };
    tokio::select! {
        code = all_ended => Ok(code),
        never = warnings => match never {},
    }
}

async fn apply(
    manifests: &Manifests,
    text: Option<&[u8]>,
    env: &Env,
) -> anyhow::Result<Vec<AppliedObject>> {
    let applied = apply_with_retries(manifests, text, env).await?;
    for object in &applied {
        print_stderr(format_args!("coracle: {object} applied"));
    }
    Ok(applied)
}

/// Applies the manifests; `text` is standard input if they come from there.
pub async fn apply_with_retries(
    manifests: &Manifests,
    text: Option<&[u8]>,
    env: &Env,
) -> anyhow::Result<Vec<AppliedObject>> {
    let mut attempt = 1;
    loop {
        match apply_once(manifests, text, env).await {
            Err(stderr) if stderr.contains("no matches for kind") && attempt < APPLY_ATTEMPTS => {
                attempt += 1;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            Err(stderr) => {
                return Err(Failure::new(
                    FailureCode::BadManifest,
                    format!("the manifests were refused\n{stderr}"),
                )
                .with_hint(
                    "kubectl's message above names the problem; `coracle run kubectl explain KIND` describes the fields",
                )
                .into());
            }
            Ok(applied) => return Ok(applied),
        }
    }
}

/// Runs `kubectl apply`. The error is kubectl's own message.
async fn apply_once(
    manifests: &Manifests,
    text: Option<&[u8]>,
    env: &Env,
) -> Result<Vec<AppliedObject>, String> {
    let mut command = kubectl(env);
    command.args(["apply", "--output=json", "--filename"]);
    match manifests {
        Manifests::File(path) => command.arg(path),
        Manifests::Directory(path) => command.arg(path).arg("--recursive"),
        Manifests::Stdin => command.arg("-"),
    };
    command.stdin(if text.is_some() {
        Stdio::piped()
    } else {
        Stdio::null()
    });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let cannot_run = |error| format!("cannot run kubectl: {error}");
    let mut child = command.spawn().map_err(cannot_run)?;
    if let (Some(mut stdin), Some(text)) = (child.stdin.take(), text) {
        let text = text.to_vec();
        tokio::spawn(async move {
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stdin, &text).await;
        });
    }
    let output = child.wait_with_output().await.map_err(cannot_run)?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    parse_applied(&output.stdout).map_err(|error| format!("cannot parse kubectl's output: {error}"))
}

/// Parses kubectl's output: one object, or a List of several.
fn parse_applied(json: &[u8]) -> serde_json::Result<Vec<AppliedObject>> {
    #[derive(Deserialize)]
    struct List {
        items: Vec<AppliedObject>,
    }
    match serde_json::from_slice::<List>(json) {
        Ok(list) => Ok(list.items),
        Err(_) => Ok(vec![serde_json::from_slice(json)?]),
    }
}

impl AppliedObject {
    fn ends(&self) -> bool {
        matches!(self.kind.as_str(), "Job" | "Pod")
    }

    fn never_ends(&self) -> bool {
        [
            "Deployment",
            "StatefulSet",
            "DaemonSet",
            "ReplicaSet",
            "ReplicationController",
            "CronJob",
        ]
        .contains(&self.kind.as_str())
    }
}

impl std::fmt::Display for AppliedObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = self.kind.to_lowercase();
        write!(f, "{kind}/{}", self.metadata.name)?;
        match self.metadata.namespace.as_str() {
            "" | "default" => Ok(()),
            namespace => write!(f, " in {namespace}"),
        }
    }
}

/// Waits until the object has ended and returns whether it succeeded. Retries while the API server restarts.
async fn wait_for(object: &AppliedObject, client: Client) -> (AppliedObject, bool) {
    let Metadata { name, namespace } = &object.metadata;
    let succeeded = loop {
        let ended = if object.kind == "Job" {
            let jobs: Api<Job> = Api::namespaced(client.clone(), namespace);
            let job = await_condition(jobs, name, job_has_ended()).await;
            job.map(|job| job.is_some_and(|job| has_condition(&job, "Complete")))
        } else {
            let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
            let pod = await_condition(pods, name, pod_has_ended()).await;
            pod.map(|pod| pod.is_some_and(|pod| phase(&pod) == PodPhase::Succeeded))
        };
        match ended {
            Ok(succeeded) => break succeeded,
            Err(error) => tracing::info!(%error, %object, "the watch broke; watching again"),
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    };
    (object.clone(), succeeded)
}

/// A deleted Job has ended too.
fn job_has_ended() -> impl Condition<Job> {
    |job: Option<&Job>| {
        job.is_none_or(|job| has_condition(job, "Complete") || has_condition(job, "Failed"))
    }
}

fn pod_has_ended() -> impl Condition<Pod> {
    |pod: Option<&Pod>| pod.is_none_or(|pod| phase(pod).is_terminal())
}

fn has_condition(job: &Job, condition_type: &str) -> bool {
    let conditions = job
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == condition_type && condition.status == "True")
}

fn phase(pod: &Pod) -> PodPhase {
    PodPhase::of(pod.status.as_ref())
}

/// Prints the logs of the object's pods to standard output, or the reason why there are none.
async fn show_logs(object: &AppliedObject, env: &Env, client: &Client) {
    let Metadata { name, namespace } = &object.metadata;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let selection = match object.kind.as_str() {
        "Job" => ListParams::default().labels(&format!("batch.kubernetes.io/job-name={name}")),
        _ => ListParams::default().fields(&format!("metadata.name={name}")),
    };
    let Ok(pods) = pods.list(&selection).await else {
        return;
    };
    for pod in pods {
        let name = pod.name_any();
        let mut command = kubectl(env);
        command
            .args(["logs", "--all-containers", "--namespace", namespace, &name])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        if command.status().await.is_ok_and(|status| status.success()) {
            continue;
        }
        let status = pod.status.unwrap_or_default();
        let reasons = [status.phase, status.reason, status.message]
            .into_iter()
            .flatten();
        print_stderr(format_args!(
            "coracle: pod {name}: {}",
            reasons.collect::<Vec<_>>().join(": ")
        ));
    }
}

fn kubectl(env: &Env) -> Command {
    let mut command = Command::new("kubectl");
    command.envs(env).kill_on_drop(true);
    command
}

async fn read_stdin() -> anyhow::Result<Vec<u8>> {
    let read = tokio::task::spawn_blocking(|| {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin(), &mut text).map(|_| text)
    });
    read.await?
        .context("cannot read manifests from standard input")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_one_object_or_list() {
        let one = br#"{"kind":"Job","metadata":{"name":"a","namespace":"default"}}"#;
        let list = br#"{"kind":"List","metadata":{},"items":[
            {"kind":"Namespace","metadata":{"name":"n"}},
            {"kind":"Pod","metadata":{"name":"b","namespace":"n"}}]}"#;
        assert_eq!(parse_applied(one).unwrap()[0].to_string(), "job/a");
        let names: Vec<String> = parse_applied(list)
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(names, ["namespace/n", "pod/b in n"]);
        assert!(parse_applied(b"nonsense").is_err());
    }
}
