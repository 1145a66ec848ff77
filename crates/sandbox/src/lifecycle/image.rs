//! The image of a container: looked for, fetched, and told about.

use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use tokio::time::Instant;

use super::back_off::go_duration;
use super::container_run::RunReporter;
use crate::container_runtime::{ContainerRuntime, ImageRequest, PodImage};
use pod_protocol::Problem;

/// Makes sure that a container's image is there, and before it those that it mounts as volumes. An error names the image.
pub async fn ensure_all<R: ContainerRuntime>(
    runtime: &R,
    report: &RunReporter,
    container: &Container,
) -> Result<PodImage, (String, Problem)> {
    for ImageRequest { reference, policy } in runtime.image_volumes(container) {
        if let Err(problem) = ensure(runtime, report, &reference, Some(&policy)).await {
            return Err((reference, problem));
        }
    }
    let reference = container.image.clone().unwrap_or_default();
    let policy = container.image_pull_policy.as_deref();
    let image = ensure(runtime, report, &reference, policy).await;
    image.map_err(|problem| (reference, problem))
}

/// Makes sure that an image is there.
async fn ensure<R: ContainerRuntime>(
    runtime: &R,
    report: &RunReporter,
    reference: &str,
    policy: Option<&str>,
) -> Result<PodImage, Problem> {
    let policy = policy.map_or_else(|| default_policy(reference), str::to_owned);
    let request = |policy: &str| ImageRequest {
        reference: reference.to_owned(),
        policy: policy.to_owned(),
    };
    if policy != "Always" {
        match runtime.ensure_image(&request("Never")).await {
            Ok(image) => {
                report.event(
                    false,
                    "Pulled",
                    format!(
                        "Container image {reference:?} already present on machine and can be accessed by the pod"
                    ),
                );
                return Ok(image);
            }
            Err(problem) if problem.reason == "InvalidImageName" => {
                report.event(true, "InspectFailed", problem.message.clone());
                return Err(failed(report, problem));
            }
            Err(_) if policy == "Never" => {
                let message = format!(
                    "Container image {reference:?} is not present with pull policy of Never"
                );
                report.event(true, "ErrImageNeverPull", message.clone());
                let problem = Problem {
                    reason: "ErrImageNeverPull".to_owned(),
                    message,
                };
                return Err(failed(report, problem));
            }
            // It has to be fetched; what is wrong beyond that shows then.
            Err(_) => {}
        }
    }
    report.event(false, "Pulling", format!("Pulling image {reference:?}"));
    let start = Instant::now();
    match runtime.ensure_image(&request(&policy)).await {
        Ok(image) => {
            let took = go_duration(Duration::from_millis(
                u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
            ));
            report.event(
                false,
                "Pulled",
                format!(
                    "Successfully pulled image {reference:?} in {took} ({took} including waiting). Image size: {} bytes.",
                    image.size
                ),
            );
            Ok(image)
        }
        Err(mut problem) => {
            if problem.reason == "InvalidImageName" {
                report.event(true, "InspectFailed", problem.message.clone());
            } else {
                report.event(
                    true,
                    "Failed",
                    format!("Failed to pull image {reference:?}: {}", problem.message),
                );
            }
            if problem.reason.is_empty() {
                problem.reason = "ErrImagePull".to_owned();
            }
            Err(failed(report, problem))
        }
    }
}

fn failed(report: &RunReporter, problem: Problem) -> Problem {
    report.event(true, "Failed", format!("Error: {}", problem.reason));
    problem
}

/// The policy of a spec that names none: images of a moving tag are looked up each time.
pub fn default_policy(reference: &str) -> String {
    let name = reference.split('@').next().unwrap_or(reference);
    let has_digest = name.len() != reference.len();
    let last = name.rsplit('/').next().unwrap_or(name);
    let tag = last.split_once(':').map(|(_, tag)| tag);
    match tag {
        None | Some("latest") if !has_digest => "Always".to_owned(),
        _ => "IfNotPresent".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::default_policy;

    #[test]
    fn the_tag_decides_the_policy() {
        for (reference, policy) in [
            ("busybox", "Always"),
            ("busybox:latest", "Always"),
            ("busybox:1.36", "IfNotPresent"),
            ("registry:5000/busybox", "Always"),
            ("registry:5000/busybox:1", "IfNotPresent"),
            ("busybox@sha256:00", "IfNotPresent"),
        ] {
            assert_eq!(default_policy(reference), policy, "{reference}");
        }
    }
}
