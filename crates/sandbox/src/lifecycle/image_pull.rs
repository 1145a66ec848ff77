//! Ensures that the images of a container are present, and reports the pulls.

use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use pod_protocol::go_duration;
use tokio::time::Instant;

use super::container_run::RunReporter;
use crate::container_runtime::{
    ContainerRuntime, ImageProblem, ImageProblemReason, ImagePullPolicy, ImageRequest, PodImage,
};

/// Ensures that a container's image is present, and first the images that it mounts as volumes. An error names the
/// image.
pub async fn ensure_images<R: ContainerRuntime>(
    runtime: &R,
    reporter: &RunReporter,
    container: &Container,
) -> Result<PodImage, (String, ImageProblem)> {
    for ImageRequest { reference, policy } in runtime.image_volumes(container) {
        if let Err(problem) = ensure_image(runtime, reporter, &reference, policy).await {
            return Err((reference, problem));
        }
    }
    let reference = container.image.clone().unwrap_or_default();
    let policy = ImagePullPolicy::from_spec(container.image_pull_policy.as_deref(), &reference);
    let image = ensure_image(runtime, reporter, &reference, policy).await;
    image.map_err(|problem| (reference, problem))
}

async fn ensure_image<R: ContainerRuntime>(
    runtime: &R,
    reporter: &RunReporter,
    reference: &str,
    policy: ImagePullPolicy,
) -> Result<PodImage, ImageProblem> {
    let request = |policy: ImagePullPolicy| ImageRequest {
        reference: reference.to_owned(),
        policy,
    };
    if policy != ImagePullPolicy::Always {
        match runtime.ensure_image(&request(ImagePullPolicy::Never)).await {
            Ok(image) => {
                reporter.normal("Pulled",
                    format!(
                        "Container image {reference:?} already present on machine and can be accessed by the pod"
                    ),
                );
                return Ok(image);
            }
            Err(problem) if problem.reason == ImageProblemReason::InvalidImageName => {
                reporter.warning("InspectFailed", problem.message.clone());
                return Err(report_failure(reporter, problem));
            }
            Err(_) if policy == ImagePullPolicy::Never => {
                let message = format!(
                    "Container image {reference:?} is not present with pull policy of Never"
                );
                reporter.warning("ErrImageNeverPull", message.clone());
                let problem = ImageProblem {
                    reason: ImageProblemReason::ErrImageNeverPull,
                    message,
                };
                return Err(report_failure(reporter, problem));
            }
            // The image has to be pulled. Other errors recur in the pull.
            Err(_) => {}
        }
    }
    reporter.normal("Pulling", format!("Pulling image {reference:?}"));
    let start = Instant::now();
    match runtime.ensure_image(&request(policy)).await {
        Ok(image) => {
            let took = go_duration(Duration::from_millis(
                u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
            ));
            reporter.normal("Pulled",
                format!(
                    "Successfully pulled image {reference:?} in {took} ({took} including waiting). Image size: {} bytes.",
                    image.size
                ),
            );
            Ok(image)
        }
        Err(problem) => {
            if problem.reason == ImageProblemReason::InvalidImageName {
                reporter.warning("InspectFailed", problem.message.clone());
            } else {
                reporter.warning(
                    "Failed",
                    format!("Failed to pull image {reference:?}: {}", problem.message),
                );
            }
            Err(report_failure(reporter, problem))
        }
    }
}

fn report_failure(reporter: &RunReporter, problem: ImageProblem) -> ImageProblem {
    reporter.warning("Failed", format!("Error: {}", problem.reason.as_str()));
    problem
}
