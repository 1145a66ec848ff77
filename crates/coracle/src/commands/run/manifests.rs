//! Manifests as a workload: applies them with kubectl. `progress/` then watches their objects.
//!
//! The workload ends when all Jobs and bare Pods have ended, with exit code 1 if any of them failed. If there are only objects that
//! never end (a Deployment, a CronJob), the cluster runs until the Slurm job ends. The workload does not wait for objects without
//! pods.

use console::{Failure, FailureCode, print_stderr};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use tokio::process::Command;

use super::object_ref::ObjectRef;
use super::workload::Manifests;

type Env = BTreeMap<&'static str, OsString>;

/// kubectl cannot apply custom resources until the API server serves their new definition.
const APPLY_ATTEMPTS: u32 = 5;

/// An object in kubectl's output.
#[derive(Debug, Clone, Deserialize)]
struct AppliedObject {
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

impl From<AppliedObject> for ObjectRef {
    fn from(object: AppliedObject) -> Self {
        let Metadata { name, namespace } = object.metadata;
        Self {
            kind: object.kind,
            namespace,
            name,
        }
    }
}

/// Applies the manifests and returns the names of their objects.
pub async fn apply(manifests: &Manifests, env: &Env) -> anyhow::Result<Vec<ObjectRef>> {
    let text = match manifests {
        // Read it once, because applying may take several attempts.
        Manifests::Stdin => Some(read_stdin().await?),
        Manifests::File(_) | Manifests::Directory(_) => None,
    };
    let applied = apply_with_retries(manifests, text.as_deref(), env).await?;
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
) -> anyhow::Result<Vec<ObjectRef>> {
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
) -> Result<Vec<ObjectRef>, String> {
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
fn parse_applied(json: &[u8]) -> serde_json::Result<Vec<ObjectRef>> {
    #[derive(Deserialize)]
    struct List {
        items: Vec<AppliedObject>,
    }
    let objects = match serde_json::from_slice::<List>(json) {
        Ok(list) => list.items,
        Err(_) => vec![serde_json::from_slice(json)?],
    };
    Ok(objects.into_iter().map(ObjectRef::from).collect())
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
