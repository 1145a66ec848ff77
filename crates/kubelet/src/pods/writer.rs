//! Writes a pod's status to the API server: the newest only, again and again until it is there.

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
use crate::api::{CallError, call};
use crate::backoff::Doubling;

/// How long to wait at most between attempts on one pod.
const RETRY_AT_MOST: Duration = Duration::from_secs(2);

/// The status of one pod, on its way to the API server.
pub(super) struct Writer {
    wanted: watch::Sender<Option<PodStatus>>,
    written: watch::Receiver<Written>,
    _task: AbortOnDropHandle<()>,
}

/// What the API server is known to say of the pod.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    /// The last status that it took.
    pub status: Option<PodStatus>,
    /// The version of the object that came of it.
    pub version: u64,
    /// It knows no such pod any more.
    pub gone: bool,
}

impl Writer {
    /// A writer for the status of `pod`; `room` bounds how many write at once.
    pub(super) fn new(client: &Client, pod: &Pod, room: Arc<Semaphore>) -> Self {
        let (wanted, wishes) = watch::channel(None);
        let (done, written) = watch::channel(Written::default());
        let target = Target {
            api: Api::namespaced(client.clone(), namespace(pod)),
            name: name(pod).to_owned(),
            uid: uid(pod).to_owned(),
            full_name: full_name(pod),
            room,
        };
        Self {
            wanted,
            written,
            _task: AbortOnDropHandle::new(tokio::spawn(write_all(target, wishes, done))),
        }
    }

    /// Makes the API server say `status`, unless `pod`, its newest view of it, says so already.
    pub(super) fn want(&self, pod: &Pod, status: &PodStatus) {
        let said = if version(pod) > self.written.borrow().version {
            says(pod.status.as_ref(), status)
        } else {
            says(self.written.borrow().status.as_ref(), status)
        };
        let queued = says(self.wanted.borrow().as_ref(), status);
        let written = says(self.written.borrow().status.as_ref(), status);
        // What is on its way needs not be sent twice; what somebody else has overwritten does.
        if !said && (!queued || written) {
            self.wanted.send_replace(Some(status.clone()));
        }
    }

    /// Waits until the API server has taken another status.
    pub(super) async fn wrote(&mut self) {
        if self.written.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// What it has taken last.
    pub(super) fn written(&self) -> Written {
        self.written.borrow().clone()
    }
}

struct Target {
    api: Api<Pod>,
    name: String,
    uid: String,
    full_name: String,
    room: Arc<Semaphore>,
}

async fn write_all(
    target: Target,
    mut wishes: watch::Receiver<Option<PodStatus>>,
    done: watch::Sender<Written>,
) {
    let mut retry = Doubling::up_to(RETRY_AT_MOST);
    while wishes.changed().await.is_ok() {
        loop {
            let room = target.room.acquire().await;
            let Some(status) = wishes.borrow_and_update().clone() else {
                break;
            };
            let written = write(&target, &status).await;
            drop(room);
            match written {
                Ok(pod) => {
                    retry.restart();
                    done.send_replace(Written {
                        status: Some(status),
                        version: version(&pod),
                        gone: false,
                    });
                    break;
                }
                Err(error) if is_of_another_pod(&error) => {
                    done.send_modify(|written| written.gone = true);
                    break;
                }
                Err(error) => {
                    tracing::warn!(
                        pod = target.full_name,
                        error = &error as &dyn std::error::Error,
                        "could not write the pod's status; will try again"
                    );
                    tokio::time::sleep(retry.wait()).await;
                }
            }
        }
    }
}

async fn write(target: &Target, status: &PodStatus) -> Result<Pod, CallError> {
    let patch = Patch::Strategic(status_patch(&target.uid, status));
    call(
        target
            .api
            .patch_status(&target.name, &PatchParams::default(), &patch),
    )
    .await
}

/// The pod is gone, or there is another of its name by now.
pub(super) fn is_of_another_pod(error: &CallError) -> bool {
    match error {
        CallError::Answer { code: 404, .. } => true,
        CallError::Answer { code: 409, message } => message.contains("UID"),
        _ => false,
    }
}

/// The version of an object; later ones are greater.
fn version(pod: &Pod) -> u64 {
    let version = pod.metadata.resource_version.as_deref();
    version.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Whether `server` says all that `wanted` does; it may say more.
fn says(server: Option<&PodStatus>, wanted: &PodStatus) -> bool {
    let Some(server) = server else { return false };
    // As JSON, so that times are compared as precisely as they are written.
    let (server, wanted) = (tidy(json!(server)), tidy(json!(wanted)));
    let conditions = |status: &Value| match &status["conditions"] {
        Value::Array(all) => all.clone(),
        _ => vec![],
    };
    let theirs = conditions(&server);
    let conditions_are_said = conditions(&wanted).iter().all(|condition| {
        theirs.iter().any(|have| {
            let same = |key| have.get(key) == condition.get(key);
            ["type", "status", "reason", "message", "observedGeneration"]
                .into_iter()
                .all(same)
        })
    });
    let rest_is_said = wanted.as_object().is_none_or(|fields| {
        let mut fields = fields.iter().filter(|(key, _)| *key != "conditions");
        fields.all(|(key, value)| server.get(key) == Some(value))
    });
    conditions_are_said && rest_is_said
}

/// Without what is empty: the API server adds some of it, and leaves some of it out.
fn tidy(value: Value) -> Value {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    match value {
        Value::Array(items) => items.into_iter().map(tidy).collect(),
        Value::Object(fields) => fields
            .into_iter()
            .map(|(key, value)| (key, tidy(value)))
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
    fn what_others_add_is_no_difference_and_parts_of_seconds_neither() {
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
        assert!(says(Some(&server), &wanted));
        server.conditions.as_mut().unwrap()[1].status = "False".to_owned();
        assert!(!says(Some(&server), &wanted));
        assert!(!says(None, &wanted));
    }
}
