//! Records Events about pods, in the form of upstream's kubelet, so that `kubectl describe` shows them as usual.
//!
//! As in upstream's event correlator, repeated events increase the count of one Event, similar events are aggregated, and
//! a rate limit per pod filters spam.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use pod_protocol::PodEvent;
use serde_json::json;
use tokio::sync::mpsc;

use crate::api_call::{ApiCallError, call};

/// Events that wait to be written. Further ones are dropped while the API server is unreachable.
const QUEUE_LENGTH: usize = 1000;
/// Maximum length of an object's name.
const MAX_NAME_LENGTH: usize = 253;
/// Maximum number of different events in the correlator's cache.
const MAX_CACHED_EVENTS: usize = 4096;
/// Events that differ only in their message are aggregated if more than this many come within [`SIMILAR_WINDOW`].
const MAX_SIMILAR: usize = 10;
const SIMILAR_WINDOW: Duration = Duration::from_secs(600);
/// The spam filter's token bucket, one per pod: its size …
const SPAM_BURST: f64 = 25.0;
/// … and the time in which one token is added.
const SPAM_REFILL_INTERVAL: Duration = Duration::from_secs(300);

/// Queues Events for writing. Never blocks.
#[derive(Clone, Debug)]
pub(crate) struct EventRecorder(mpsc::Sender<(Arc<Pod>, PodEvent)>);

impl EventRecorder {
    /// A recorder, and the task that writes its Events.
    pub(crate) fn new(client: Client, node: String) -> (Self, impl Future<Output = ()>) {
        let (sender, receiver) = mpsc::channel(QUEUE_LENGTH);
        (Self(sender), write_all(client, node, receiver))
    }

    /// Records an event of a pod's sandbox.
    pub(crate) fn record(&self, pod: &Arc<Pod>, event: PodEvent) {
        if self.0.try_send((Arc::clone(pod), event)).is_err() {
            tracing::debug!("event queue is full: dropping an event");
        }
    }

    /// Records an event of type `Normal`.
    pub(crate) fn normal(&self, pod: &Arc<Pod>, reason: &str, message: &str) {
        self.record_own(pod, false, reason, message);
    }

    /// Records an event of type `Warning`.
    pub(crate) fn warning(&self, pod: &Arc<Pod>, reason: &str, message: &str) {
        self.record_own(pod, true, reason, message);
    }

    fn record_own(&self, pod: &Arc<Pod>, warning: bool, reason: &str, message: &str) {
        let event = PodEvent {
            serial: 0,
            at: Timestamp::now(),
            warning,
            reason: reason.to_owned(),
            message: message.to_owned(),
            field_path: None,
        };
        self.record(pod, event);
    }
}

async fn write_all(client: Client, node: String, mut events: mpsc::Receiver<(Arc<Pod>, PodEvent)>) {
    let mut correlator = EventCorrelator::default();
    while let Some((pod, mut event)) = events.recv().await {
        correlator.aggregate(&pod, &mut event, Instant::now());
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(client.clone(), namespace);
        let new = pod_event(&pod, &node, &event);
        let written = match correlator.correlate(&pod, &event, &new, Instant::now()) {
            EventAction::Drop => continue,
            EventAction::Create => call(api.create(&PostParams::default(), &new)).await,
            EventAction::Patch { name, count } => {
                let patch = json!({ "count": count, "lastTimestamp": Time(event.at) });
                let patch = Patch::Strategic(patch);
                match call(api.patch(&name, &PatchParams::default(), &patch)).await {
                    // The Event has expired, or was never written: create it again, as upstream does.
                    Err(ApiCallError::Status { code: 404, .. }) => {
                        correlator.rename(&name, &new);
                        let new = Event {
                            count: Some(count),
                            ..new
                        };
                        call(api.create(&PostParams::default(), &new)).await
                    }
                    patched => patched,
                }
            }
        };
        // Not retried: the pod's status has the same information.
        if let Err(error) = written {
            tracing::debug!(
                reason = event.reason,
                error = &error as &dyn std::error::Error,
                "cannot record event"
            );
        }
    }
}

/// Decides how an event is written, from the events before it.
#[derive(Default)]
struct EventCorrelator {
    /// The name and count of each Event.
    counts: HashMap<EventKey, (String, i32)>,
    /// By key without message: the messages since a time.
    similar: HashMap<EventKey, (HashSet<String>, Instant)>,
    /// By pod: the tokens that were left at a time.
    tokens: HashMap<String, (f64, Instant)>,
}

/// Identifies equal events: pod, warning or not, reason, message, field path.
type EventKey = (String, bool, String, String, Option<String>);

fn event_key(pod: &Pod, event: &PodEvent, message: String) -> EventKey {
    (
        pod.metadata.uid.clone().unwrap_or_default(),
        event.warning,
        event.reason.clone(),
        message,
        event.field_path.clone(),
    )
}

/// The action for an event.
#[derive(Debug, PartialEq)]
enum EventAction {
    Drop,
    Create,
    /// Increase the count of an existing Event.
    Patch {
        name: String,
        count: i32,
    },
}

impl EventCorrelator {
    /// Marks an event as one of many similar ones, so that they are counted in one Event.
    fn aggregate(&mut self, pod: &Pod, event: &mut PodEvent, now: Instant) {
        let key = event_key(pod, event, String::new());
        let (messages, since) = self
            .similar
            .entry(key)
            .or_insert_with(|| (HashSet::new(), now));
        if now.duration_since(*since) > SIMILAR_WINDOW {
            (*messages, *since) = (HashSet::new(), now);
        }
        if messages.len() < MAX_SIMILAR {
            messages.insert(event.message.clone());
        } else if !messages.contains(&event.message) {
            event.message = format!("(combined from similar events): {}", event.message);
        }
    }

    fn correlate(&mut self, pod: &Pod, event: &PodEvent, new: &Event, now: Instant) -> EventAction {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let (left, since) = self.tokens.get(&uid).copied().unwrap_or((SPAM_BURST, now));
        let earned = now.duration_since(since).as_secs_f64() / SPAM_REFILL_INTERVAL.as_secs_f64();
        let left = (left + earned).min(SPAM_BURST);
        if left < 1.0 {
            self.tokens.insert(uid, (left, now));
            return EventAction::Drop;
        }
        self.tokens.insert(uid, (left - 1.0, now));

        // Aggregated events are counted in one Event, which keeps the first message.
        let aggregated = event.message.starts_with("(combined from");
        let message = if aggregated {
            "(combined)"
        } else {
            &event.message
        };
        let key = event_key(pod, event, message.to_owned());
        if let Some((name, count)) = self.counts.get_mut(&key) {
            *count += 1;
            return EventAction::Patch {
                name: name.clone(),
                count: *count,
            };
        }
        // Clearing all is rare, and only causes duplicate Events.
        if self.counts.len() >= MAX_CACHED_EVENTS {
            self.counts.clear();
            self.similar.clear();
            self.tokens.clear();
        }
        let name = new.metadata.name.clone().unwrap_or_default();
        self.counts.insert(key, (name, 1));
        EventAction::Create
    }

    /// Replaces the name of an Event.
    fn rename(&mut self, name: &str, new: &Event) {
        let mut all = self.counts.values_mut();
        if let (Some((own, _)), Some(new)) = (all.find(|(own, _)| own == name), &new.metadata.name)
        {
            own.clone_from(new);
        }
    }
}

/// An Event about `pod`, from the kubelet of `node`.
fn pod_event(pod: &Pod, node: &str, event: &PodEvent) -> Event {
    let name = pod.metadata.name.clone().unwrap_or_default();
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(&name, event.at)),
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
            field_path: event.field_path.clone(),
        },
        type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
        reason: Some(event.reason.clone()),
        message: Some(event.message.clone()),
        count: Some(1),
        first_timestamp: Some(Time(event.at)),
        last_timestamp: Some(Time(event.at)),
        source: Some(EventSource {
            component: Some("kubelet".to_owned()),
            host: Some(node.to_owned()),
        }),
        reporting_component: Some("kubelet".to_owned()),
        reporting_instance: Some(node.to_owned()),
        ..Default::default()
    }
}

/// The object's name and the time, as in upstream. So names are sorted by time, and a restarted kubelet does not record an
/// event of a sandbox twice.
fn event_name(object: &str, at: Timestamp) -> String {
    let time = format!("{:x}", at.as_nanosecond());
    let max = MAX_NAME_LENGTH.saturating_sub(time.len() + 1);
    let short = object.get(..max).unwrap_or(object);
    format!("{}.{time}", short.trim_end_matches(['-', '.']))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use bytes::Bytes;
    use http::{Method, Request, Response};
    use http_body_util::{BodyExt, Full};
    use kube::client::Body;
    use serde_json::Value;
    use tower::service_fn;

    use super::*;

    fn pod() -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some("hello".to_owned());
        pod.metadata.namespace = Some("default".to_owned());
        pod.metadata.uid = Some("1234".to_owned());
        pod
    }

    fn event(reason: &str, message: &str) -> PodEvent {
        PodEvent {
            serial: 0,
            at: Timestamp::UNIX_EPOCH,
            warning: true,
            reason: reason.to_owned(),
            message: message.to_owned(),
            field_path: None,
        }
    }

    #[test]
    fn warning_event_of_a_pod() {
        let event = PodEvent {
            at: Timestamp::from_second(1_800_000_000).unwrap(),
            ..event("Reason", "why")
        };
        insta::assert_json_snapshot!(pod_event(&pod(), "node1", &event));
    }

    #[test]
    fn repeated_event_is_counted() {
        let (mut correlator, now) = (EventCorrelator::default(), Instant::now());
        let mut correlate = |message, nanos| {
            let event = PodEvent {
                serial: 9,
                at: Timestamp::from_nanosecond(nanos).unwrap(),
                ..event("BackOff", message)
            };
            correlator.correlate(&pod(), &event, &pod_event(&pod(), "n", &event), now)
        };
        assert_eq!(correlate("a", 1), EventAction::Create);
        assert_eq!(correlate("b", 2), EventAction::Create);
        let patch = EventAction::Patch {
            name: "hello.1".to_owned(),
            count: 2,
        };
        assert_eq!(correlate("a", 3), patch);
    }

    /// A fake API server that stores Events by name, with their count.
    fn api_server() -> (Client, Arc<Mutex<BTreeMap<String, Value>>>) {
        let events: Arc<Mutex<BTreeMap<String, Value>>> = Arc::default();
        let stored = Arc::clone(&events);
        let service = service_fn(move |request: Request<Body>| {
            let stored = Arc::clone(&stored);
            async move {
                let (parts, body) = request.into_parts();
                let body: Value = serde_json::from_slice(&body.collect().await?.to_bytes())?;
                let mut stored = stored.lock().unwrap();
                let name = parts.uri.path().rsplit('/').next().unwrap_or_default();
                let (code, response) = match (parts.method, stored.get_mut(name)) {
                    (Method::POST, _) => {
                        let name = body["metadata"]["name"].as_str().unwrap_or_default();
                        stored.insert(name.to_owned(), body["count"].clone());
                        (201, body)
                    }
                    (_, Some(count)) => {
                        *count = body["count"].clone();
                        (200, json!({ "metadata": {}, "involvedObject": {} }))
                    }
                    (_, None) => (
                        404,
                        json!({ "status": "Failure", "code": 404, "message": "" }),
                    ),
                };
                let response = Response::builder()
                    .status(code)
                    .body(Full::new(Bytes::from(response.to_string())))?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(response)
            }
        });
        (Client::new(service, "default"), events)
    }

    #[tokio::test]
    async fn expired_event_is_created_again() {
        let (client, events) = api_server();
        let (recorder, recording) = EventRecorder::new(client, "n".to_owned());
        let recording = tokio::spawn(recording);
        let pod = Arc::new(pod());
        let record = |nanos| {
            let at = Timestamp::from_nanosecond(nanos).unwrap();
            recorder.record(
                &pod,
                PodEvent {
                    at,
                    ..event("BackOff", "a")
                },
            );
        };
        record(1);
        record(2);
        while events.lock().unwrap().get("hello.1") != Some(&json!(2)) {
            tokio::task::yield_now().await;
        }
        events.lock().unwrap().clear();
        record(3);
        record(4);
        drop(recorder);
        recording.await.unwrap();
        let stored = events.lock().unwrap().clone();
        assert_eq!(stored, [("hello.3".to_owned(), json!(4))].into());
    }

    #[test]
    fn names_sort_by_time_and_have_bounded_length() {
        let name =
            |object: &str, second| event_name(object, Timestamp::from_second(second).unwrap());
        assert!(name("a", 1_800_000_000) < name("a", 1_800_000_001));
        let long = name(
            &format!("{}-{}", "a".repeat(235), "b".repeat(17)),
            1_800_000_000,
        );
        assert_eq!(long, format!("{}.18fae27693b40000", "a".repeat(235)));
    }

    #[test]
    fn similar_events_are_aggregated() {
        let (mut correlator, now) = (EventCorrelator::default(), Instant::now());
        let mut correlate = |number: usize| {
            let mut event = event("Unhealthy", &number.to_string());
            correlator.aggregate(&pod(), &mut event, now);
            let new = pod_event(&pod(), "n", &event);
            let action = correlator.correlate(&pod(), &event, &new, now);
            (event.message.clone(), action)
        };
        for number in 0..10 {
            assert_eq!(correlate(number), (number.to_string(), EventAction::Create));
        }
        let (message, action) = correlate(10);
        assert_eq!(message, "(combined from similar events): 10");
        assert_eq!(action, EventAction::Create);
        assert!(matches!(
            correlate(11).1,
            EventAction::Patch { count: 2, .. }
        ));
        // A message that is already known is not aggregated.
        assert_eq!(correlate(3).0, "3");
    }

    #[test]
    fn spam_of_a_pod_is_dropped() {
        let (mut correlator, start) = (EventCorrelator::default(), Instant::now());
        let mut correlate = |number: usize, now| {
            let event = event("Noise", &number.to_string());
            let new = pod_event(&pod(), "n", &event);
            correlator.correlate(&pod(), &event, &new, now)
        };
        for number in 0..25 {
            assert_eq!(correlate(number, start), EventAction::Create);
        }
        assert_eq!(correlate(25, start), EventAction::Drop);
        assert_eq!(
            correlate(26, start + SPAM_REFILL_INTERVAL),
            EventAction::Create
        );
    }
}
