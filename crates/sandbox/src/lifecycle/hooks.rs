//! postStart and preStop.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use tokio::time::sleep;

use super::plan::seconds;
use crate::probe::http;
use crate::container_runtime::ContainerRuntime;

/// A hook has no limit of its own: the grace period ends a preStop hook, and a postStart hook may take its time.
const UNLIMITED: Duration = Duration::from_secs(30 * 86_400);

/// Where a container is found.
#[derive(Clone, Debug)]
pub struct HookContext {
    /// The pod as messages name it: `NAME_NAMESPACE(UID)`.
    pub pod: String,
    /// Its first address.
    pub ip: Option<IpAddr>,
}

/// Runs a hook to its end; an error is for people.
pub async fn run<R: ContainerRuntime>(
    runtime: &R,
    place: &HookContext,
    container: &Container,
    id: &str,
    hook: &LifecycleHandler,
) -> Result<(), String> {
    let (name, pod) = (&container.name, &place.pod);
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let failed = |error: String, output: &str| {
            format!(
                "Exec lifecycle hook ([{}]) for Container {name:?} in Pod {pod:?} failed - error: {error}, message: {output:?}",
                command.join(" ")
            )
        };
        match runtime.exec(id, &command, UNLIMITED).await {
            Ok(result) if result.code == Some(0) => Ok(()),
            Ok(result) => {
                let error = match result.code {
                    Some(code) => format!("command '{}' exited with {code}", command.join(" ")),
                    None => "command timed out".to_owned(),
                };
                Err(failed(error, &result.output))
            }
            Err(problem) => Err(failed(problem.message, "")),
        }
    } else if let Some(get) = &hook.http_get {
        http::hook(runtime, place.ip, container, get)
            .await
            .map_err(|error| {
                format!(
                    "HTTP lifecycle hook ({}) for Container {name:?} in Pod {pod:?} failed - error: {error}",
                    get.path.as_deref().unwrap_or_default()
                )
            })
    } else if let Some(pause) = &hook.sleep {
        sleep(seconds(pause.seconds)).await;
        Ok(())
    } else {
        Err(format!(
            "Cannot run handler: invalid handler of container {name:?}"
        ))
    }
}
