//! Ensures that the images of a container are present, and reports the pulls.

use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use tokio::time::Instant;

use super::back_off::go_duration;
use super::run::Reporter;
use crate::seams::{ImageRequest, PodImage, Runtime};
use pod_protocol::Problem;

/// Ensures that a container's image is present, and first the images that it mounts as volumes. An error names the
/// image.
pub async fn ensure_all<R: Runtime>(
    runtime: &R,
    report: &Reporter,
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

async fn ensure<R: Runtime>(
    runtime: &R,
    report: &Reporter,
    reference: &str,
    policy: Option<&str>,
) -> Result<PodImage, Problem> {
    let policy = policy.map_or_else(|| default_policy(reference), str::to_owned);
    let request = |policy: &str| ImageRequest {
        reference: reference.to_owned(),
        policy: policy.to_owned(),
    };
    if policy != "Always" {
        match runtime.image(&request("Never")).await {
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
            // The image has to be pulled. Other errors recur in the pull.
            Err(_) => {}
        }
    }
    report.event(false, "Pulling", format!("Pulling image {reference:?}"));
    let start = Instant::now();
    match runtime.image(&request(&policy)).await {
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

fn failed(report: &Reporter, problem: Problem) -> Problem {
    report.event(true, "Failed", format!("Error: {}", problem.reason));
    problem
}

/// The default pull policy: `Always` for the tag `latest` or no tag, unless there is a digest.
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
    fn default_pull_policy_depends_on_the_tag() {
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
