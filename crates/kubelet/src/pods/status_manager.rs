//! The status manager of a pod: writes its newest status to the API server, with retries.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio_util::task::AbortOnDropHandle;

use super::spec::{full_name, name, namespace, uid};
use super::status::status_patch;
use crate::api_call::{ApiCallError, call};
use crate::backoff::ExponentialBackoff;

const MAX_STATUS_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Writes the status of one pod.
pub(super) struct StatusManager {
    wanted: watch::Sender<Option<PodStatus>>,
    written: watch::Receiver<WrittenStatus>,
    _task: AbortOnDropHandle<()>,
}

/// The result of the last write.
#[derive(Clone, Debug, Default)]
pub(super) struct WrittenStatus {
    /// The last status that the API server accepted.
    pub status: Option<PodStatus>,
    /// The resourceVersion after the write.
    pub version: u64,
    /// The API server has deleted the pod.
    pub pod_deleted: bool,
}

impl StatusManager {
    /// A status manager for `pod`. `permits` limits concurrent writes of all pods.
    pub(super) fn new(client: &Client, pod: &Pod, permits: Arc<Semaphore>) -> Self {
        let (wanted, wanted_receiver) = watch::channel(None);
        let (written_sender, written) = watch::channel(WrittenStatus::default());
        let target = Target {
            api: Api::namespaced(client.clone(), namespace(pod)),
            name: name(pod).to_owned(),
            uid: uid(pod).to_owned(),
            full_name: full_name(pod),
            permits,
        };
        Self {
            wanted,
            written,
            _task: AbortOnDropHandle::new(tokio::spawn(write_all(
                target,
                wanted_receiver,
                written_sender,
            ))),
        }
    }

    /// Writes `status`, unless `pod`, the newest version from the API server, already has it.
    pub(super) fn set_status(&self, pod: &Pod, status: &PodStatus) {
        let reported = if version(pod) > self.written.borrow().version {
            is_reported(pod.status.as_ref(), status)
        } else {
            is_reported(self.written.borrow().status.as_ref(), status)
        };
        let queued = is_reported(self.wanted.borrow().as_ref(), status);
        let written = is_reported(self.written.borrow().status.as_ref(), status);
        // A queued status is not queued twice, but a written one that was overwritten by another client is written again.
        if !reported && (!queued || written) {
            self.wanted.send_replace(Some(status.clone()));
        }
    }

    /// Waits for the next write.
    pub(super) async fn wait_for_write(&mut self) {
        if self.written.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// The result of the last write.
    pub(super) fn written(&self) -> WrittenStatus {
        self.written.borrow().clone()
    }
}

struct Target {
    api: Api<Pod>,
    name: String,
    uid: String,
    full_name: String,
    permits: Arc<Semaphore>,
}

async fn write_all(
    target: Target,
    mut wanted: watch::Receiver<Option<PodStatus>>,
    written_sender: watch::Sender<WrittenStatus>,
) {
    let mut backoff = ExponentialBackoff::up_to(MAX_STATUS_RETRY_DELAY);
    while wanted.changed().await.is_ok() {
        loop {
            let permit = target.permits.acquire().await;
            let Some(status) = wanted.borrow_and_update().clone() else {
                break;
            };
            let written = write(&target, &status).await;
            drop(permit);
            match written {
                Ok(pod) => {
                    backoff.reset();
                    written_sender.send_replace(WrittenStatus {
                        status: Some(status),
                        version: version(&pod),
                        pod_deleted: false,
                    });
                    break;
                }
                Err(error) if is_pod_deleted(&error) => {
                    written_sender.send_modify(|written| written.pod_deleted = true);
                    break;
                }
                Err(error) => {
                    tracing::warn!(
                        pod = target.full_name,
                        error = &error as &dyn std::error::Error,
                        "cannot update pod status; will retry"
                    );
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        }
    }
}

async fn write(target: &Target, status: &PodStatus) -> Result<Pod, ApiCallError> {
    let patch = Patch::Strategic(status_patch(&target.uid, status));
    call(
        target
            .api
            .patch_status(&target.name, &PatchParams::default(), &patch),
    )
    .await
}

/// Whether the pod was deleted, or replaced by another one of the same name.
pub(super) fn is_pod_deleted(error: &ApiCallError) -> bool {
    match error {
        ApiCallError::Status { code: 404, .. } => true,
        ApiCallError::Status { code: 409, message } => message.contains("UID"),
        _ => false,
    }
}

/// The pod's resourceVersion as a number: the API server increases it with every change.
fn version(pod: &Pod) -> u64 {
    let version = pod.metadata.resource_version.as_deref();
    version.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Whether `server` contains all of `wanted`. It may contain more.
fn is_reported(server: Option<&PodStatus>, wanted: &PodStatus) -> bool {
    let Some(server) = server else { return false };
    // Compared as JSON, in which times have the precision of the API.
    let (server, wanted) = (without_empty(json!(server)), without_empty(json!(wanted)));
    let conditions = |status: &Value| match &status["conditions"] {
        Value::Array(all) => all.clone(),
        _ => vec![],
    };
    let server_conditions = conditions(&server);
    let conditions_reported = conditions(&wanted).iter().all(|condition| {
        server_conditions.iter().any(|have| {
            let same = |key| have.get(key) == condition.get(key);
            ["type", "status", "reason", "message", "observedGeneration"]
                .into_iter()
                .all(same)
        })
    });
    let rest_reported = wanted.as_object().is_none_or(|fields| {
        let mut fields = fields.iter().filter(|(key, _)| *key != "conditions");
        fields.all(|(key, value)| server.get(key) == Some(value))
    });
    conditions_reported && rest_reported
}

/// Removes empty values, because the API server adds or drops them.
fn without_empty(value: Value) -> Value {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    match value {
        Value::Array(items) => items.into_iter().map(without_empty).collect(),
        Value::Object(fields) => fields
            .into_iter()
            .map(|(key, value)| (key, without_empty(value)))
            .filter(|(_, value)| !is_empty(value))
            .collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ContainerStatus, PodCondition};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn foreign_fields_and_subseconds_are_no_difference() {
        let condition = |type_: &str| PodCondition {
            type_: type_.to_owned(),
            status: "True".to_owned(),
            ..Default::default()
        };
        let wanted = PodStatus {
            phase: Some("Running".to_owned()),
            start_time: Some(Time(Timestamp::from_millisecond(1_500).unwrap())),
            conditions: Some(vec![condition("Ready")]),
            pod_ips: Some(vec![]),
            container_statuses: Some(vec![ContainerStatus::default()]),
            ..Default::default()
        };
        let mut server = PodStatus {
            start_time: Some(Time(Timestamp::from_second(1).unwrap())),
            qos_class: Some("BestEffort".to_owned()),
            conditions: Some(vec![condition("PodScheduled"), condition("Ready")]),
            pod_ips: None,
            container_statuses: Some(vec![ContainerStatus {
                last_state: Some(Default::default()),
                ..Default::default()
            }]),
            ..wanted.clone()
        };
        assert!(is_reported(Some(&server), &wanted));
        server.conditions.as_mut().unwrap()[1].status = "False".to_owned();
        assert!(!is_reported(Some(&server), &wanted));
        assert!(!is_reported(None, &wanted));
    }
}
