//! Events about pods, in the form of upstream's kubelet, so that `kubectl describe` shows them as usual.

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;

/// A Warning about `pod`, from the kubelet of `node`.
pub(crate) fn pod_warning(
    pod: &Pod,
    node: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Event {
    let name = pod.metadata.name.clone().unwrap_or_default();
    Event {
        metadata: ObjectMeta {
            // Upstream's way to a unique name: the object's, and the time.
            name: Some(format!("{name}.{:x}", now.as_nanosecond())),
            namespace: pod.metadata.namespace.clone(),
            ..Default::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name),
            namespace: pod.metadata.namespace.clone(),
            resource_version: pod.metadata.resource_version.clone(),
            uid: pod.metadata.uid.clone(),
            field_path: None,
        },
        type_: Some("Warning".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        count: Some(1),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        source: Some(EventSource {
            component: Some("kubelet".to_owned()),
            host: Some(node.to_owned()),
        }),
        reporting_component: Some("kubelet".to_owned()),
        reporting_instance: Some(node.to_owned()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_about_a_pod() {
        let mut pod = Pod::default();
        pod.metadata.name = Some("hello".to_owned());
        pod.metadata.namespace = Some("default".to_owned());
        pod.metadata.uid = Some("1234".to_owned());
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        insta::assert_json_snapshot!(pod_warning(&pod, "node1", "Reason", "why", now));
    }
}
