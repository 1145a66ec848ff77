//! postStart and preStop hooks.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use tokio::time::sleep;

use super::clock::seconds;
use super::probe::http;
use crate::container_runtime::ContainerRuntime;

/// In effect none: the grace period bounds a preStop hook, and a postStart hook is unbounded. As upstream.
const EXEC_TIMEOUT: Duration = Duration::from_secs(30 * 86_400);

/// The pod of a hook's container.
#[derive(Clone, Debug)]
pub struct HookPod {
    /// The pod in messages: `NAME_NAMESPACE(UID)`.
    pub full_name: String,
    /// The pod's first IP address.
    pub ip: Option<IpAddr>,
}

/// Runs a hook to its end. The error is a message for the container's status.
pub async fn run<R: ContainerRuntime>(
    runtime: &R,
    pod: &HookPod,
    container: &Container,
    id: &str,
    hook: &LifecycleHandler,
) -> Result<(), String> {
    let (name, pod_name) = (&container.name, &pod.full_name);
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let exec_error = |error: String, output: &str| {
            format!(
                "Exec lifecycle hook ([{}]) for Container {name:?} in Pod {pod_name:?} failed - error: {error}, message: {output:?}",
                command.join(" ")
            )
        };
        match runtime.exec(id, &command, EXEC_TIMEOUT).await {
            Ok(result) if result.code == Some(0) => Ok(()),
            Ok(result) => {
                let error = match result.code {
                    Some(code) => format!("command '{}' exited with {code}", command.join(" ")),
                    None => "command timed out".to_owned(),
                };
                Err(exec_error(error, &result.output))
            }
            Err(problem) => Err(exec_error(problem.message, "")),
        }
    } else if let Some(get) = &hook.http_get {
        http::hook(runtime, pod.ip, container, get)
            .await
            .map_err(|error| {
                format!(
                    "HTTP lifecycle hook ({}) for Container {name:?} in Pod {pod_name:?} failed - error: {error}",
                    get.path.as_deref().unwrap_or_default()
                )
            })
    } else if let Some(action) = &hook.sleep {
        sleep(seconds(action.seconds)).await;
        Ok(())
    } else {
        Err(format!(
            "Cannot run handler: invalid handler of container {name:?}"
        ))
    }
}
