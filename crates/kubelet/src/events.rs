//! Events about pods, in the form of upstream's kubelet, so that `kubectl describe` shows them as usual.
//!
//! What repeats is counted in one Event instead of filling the API server, and a pod that says too much is not heard
//! for a while: both as upstream's recorder does it.

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

use crate::api::{CallError, call};

/// How many may wait to be written; what comes while the API server is away beyond that is lost.
const QUEUE: usize = 1000;
/// The longest name that an object may have.
const MAX_NAME: usize = 253;
/// How many different things are remembered as said.
const REMEMBERED: usize = 4096;
/// So many things that differ in their words only, within that time, become one.
const SIMILAR: usize = 10;
const SIMILAR_WITHIN: Duration = Duration::from_secs(600);
/// A pod may say this much at once …
const BURST: f64 = 25.0;
/// … and then one more thing in this time.
const REFILL: Duration = Duration::from_secs(300);

/// Takes Events, and never makes anybody wait.
#[derive(Clone, Debug)]
pub(crate) struct Recorder(mpsc::Sender<(Arc<Pod>, PodEvent)>);

impl Recorder {
    /// A recorder, and the work of writing what it takes.
    pub(crate) fn new(client: Client, node: String) -> (Self, impl Future<Output = ()>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self(sender), write_all(client, node, receiver))
    }

    /// Says something about a pod.
    pub(crate) fn record(&self, pod: &Arc<Pod>, event: PodEvent) {
        if self.0.try_send((Arc::clone(pod), event)).is_err() {
            tracing::debug!("too many events: one is lost");
        }
    }

    /// Says something about a pod as the kubelet itself.
    pub(crate) fn say(&self, pod: &Arc<Pod>, warning: bool, reason: &str, message: &str) {
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
    let mut said = Said::default();
    while let Some((pod, mut event)) = events.recv().await {
        said.combine(&pod, &mut event, Instant::now());
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(client.clone(), namespace);
        let new = pod_event(&pod, &node, &event);
        let written = match said.about(&pod, &event, &new, Instant::now()) {
            Saying::Silence => continue,
            Saying::New => call(api.create(&PostParams::default(), &new)).await,
            Saying::Again { name, count } => {
                let patch = json!({ "count": count, "lastTimestamp": Time(event.at) });
                let patch = Patch::Strategic(patch);
                match call(api.patch(&name, &PatchParams::default(), &patch)).await {
                    // It has been there for long enough, or was never written: said anew, as upstream does.
                    Err(CallError::Answer { code: 404, .. }) => {
                        said.rename(&name, &new);
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
        // The status says it all; an event that gets lost is not worth another attempt.
        if let Err(error) = written {
            tracing::debug!(
                reason = event.reason,
                error = &error as &dyn std::error::Error,
                "could not record an event"
            );
        }
    }
}

/// What has been said of whom.
#[derive(Default)]
struct Said {
    /// By pod and what was said: the Event's name, and how often.
    counts: HashMap<What, (String, i32)>,
    /// By pod and what was said but for the words: which words, since when.
    similar: HashMap<What, (HashSet<String>, Instant)>,
    /// By pod: what it may still say, as of when.
    budgets: HashMap<String, (f64, Instant)>,
}

/// A pod, and all of an event that makes it the same as another: warning or not, reason, message, container.
type What = (String, bool, String, String, Option<String>);

fn what(pod: &Pod, event: &PodEvent, words: String) -> What {
    (
        pod.metadata.uid.clone().unwrap_or_default(),
        event.warning,
        event.reason.clone(),
        words,
        event.field_path.clone(),
    )
}

/// How to say something.
#[derive(Debug, PartialEq)]
enum Saying {
    /// Not at all.
    Silence,
    /// As a new Event.
    New,
    /// As one more of an Event that is there.
    Again { name: String, count: i32 },
}

impl Said {
    /// Gives an event that comes in ever new words the same words each time, so that it is counted.
    fn combine(&mut self, pod: &Pod, event: &mut PodEvent, now: Instant) {
        let kind = what(pod, event, String::new());
        let (words, since) = self
            .similar
            .entry(kind)
            .or_insert_with(|| (HashSet::new(), now));
        if now.duration_since(*since) > SIMILAR_WITHIN {
            (*words, *since) = (HashSet::new(), now);
        }
        if words.len() < SIMILAR {
            words.insert(event.message.clone());
        } else if !words.contains(&event.message) {
            event.message = format!("(combined from similar events): {}", event.message);
        }
    }

    fn about(&mut self, pod: &Pod, event: &PodEvent, new: &Event, now: Instant) -> Saying {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let (left, since) = self.budgets.get(&uid).copied().unwrap_or((BURST, now));
        let earned = now.duration_since(since).as_secs_f64() / REFILL.as_secs_f64();
        let left = (left + earned).min(BURST);
        if left < 1.0 {
            self.budgets.insert(uid, (left, now));
            return Saying::Silence;
        }
        self.budgets.insert(uid, (left - 1.0, now));

        // What was combined is counted as one, and keeps the words of the first.
        let combined = event.message.starts_with("(combined from");
        let words = if combined {
            "(combined)"
        } else {
            &event.message
        };
        let what = what(pod, event, words.to_owned());
        if let Some((name, count)) = self.counts.get_mut(&what) {
            *count += 1;
            return Saying::Again {
                name: name.clone(),
                count: *count,
            };
        }
        // To forget all is crude, but rare, and costs no more than a second Event of the same kind.
        if self.counts.len() >= REMEMBERED {
            self.counts.clear();
            self.similar.clear();
            self.budgets.clear();
        }
        let name = new.metadata.name.clone().unwrap_or_default();
        self.counts.insert(what, (name, 1));
        Saying::New
    }

    /// What was said in the Event of this name is said in another from now on.
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

/// The object's name and the time, as upstream has it: in the order of their names events are in that of their times, and
/// a kubelet that hears of one a second time, after its own death, doesn't record it again.
fn event_name(object: &str, at: Timestamp) -> String {
    let time = format!("{:x}", at.as_nanosecond());
    let room = MAX_NAME.saturating_sub(time.len() + 1);
    let short = object.get(..room).unwrap_or(object);
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
    fn a_warning_about_a_pod() {
        let event = PodEvent {
            at: Timestamp::from_second(1_800_000_000).unwrap(),
            ..event("Reason", "why")
        };
        insta::assert_json_snapshot!(pod_event(&pod(), "node1", &event));
    }

    #[test]
    fn what_repeats_is_counted() {
        let (mut said, now) = (Said::default(), Instant::now());
        let mut say = |words, nanos| {
            let event = PodEvent {
                serial: 9,
                at: Timestamp::from_nanosecond(nanos).unwrap(),
                ..event("BackOff", words)
            };
            said.about(&pod(), &event, &pod_event(&pod(), "n", &event), now)
        };
        assert_eq!(say("a", 1), Saying::New);
        assert_eq!(say("b", 2), Saying::New);
        let again = Saying::Again {
            name: "hello.1".to_owned(),
            count: 2,
        };
        assert_eq!(say("a", 3), again);
    }

    /// An API server with nothing but Events, whose names and counts it tells.
    fn api_server() -> (Client, Arc<Mutex<BTreeMap<String, Value>>>) {
        let events: Arc<Mutex<BTreeMap<String, Value>>> = Arc::default();
        let kept = Arc::clone(&events);
        let service = service_fn(move |request: Request<Body>| {
            let kept = Arc::clone(&kept);
            async move {
                let (parts, body) = request.into_parts();
                let body: Value = serde_json::from_slice(&body.collect().await?.to_bytes())?;
                let mut kept = kept.lock().unwrap();
                let named = parts.uri.path().rsplit('/').next().unwrap_or_default();
                let (code, answer) = match (parts.method, kept.get_mut(named)) {
                    (Method::POST, _) => {
                        let name = body["metadata"]["name"].as_str().unwrap_or_default();
                        kept.insert(name.to_owned(), body["count"].clone());
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
                let answer = Response::builder()
                    .status(code)
                    .body(Full::new(Bytes::from(answer.to_string())))?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(answer)
            }
        });
        (Client::new(service, "default"), events)
    }

    #[tokio::test]
    async fn what_is_said_of_an_event_that_is_gone_is_said_anew() {
        let (client, events) = api_server();
        let (recorder, recording) = Recorder::new(client, "n".to_owned());
        let recording = tokio::spawn(recording);
        let pod = Arc::new(pod());
        let say = |nanos| {
            let at = Timestamp::from_nanosecond(nanos).unwrap();
            recorder.record(
                &pod,
                PodEvent {
                    at,
                    ..event("BackOff", "a")
                },
            );
        };
        say(1);
        say(2);
        while events.lock().unwrap().get("hello.1") != Some(&json!(2)) {
            tokio::task::yield_now().await;
        }
        events.lock().unwrap().clear();
        say(3);
        say(4);
        drop(recorder);
        recording.await.unwrap();
        let left = events.lock().unwrap().clone();
        assert_eq!(left, [("hello.3".to_owned(), json!(4))].into());
    }

    #[test]
    fn names_are_in_the_order_of_times_and_never_too_long() {
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
    fn what_comes_in_ever_new_words_is_combined() {
        let (mut said, now) = (Said::default(), Instant::now());
        let mut say = |number: usize| {
            let mut event = event("Unhealthy", &number.to_string());
            said.combine(&pod(), &mut event, now);
            let new = pod_event(&pod(), "n", &event);
            (event.message.clone(), said.about(&pod(), &event, &new, now))
        };
        for number in 0..10 {
            assert_eq!(say(number), (number.to_string(), Saying::New));
        }
        let (message, saying) = say(10);
        assert_eq!(message, "(combined from similar events): 10");
        assert_eq!(saying, Saying::New);
        assert!(matches!(say(11).1, Saying::Again { count: 2, .. }));
        // What was said before is still counted as itself.
        assert_eq!(say(3).0, "3");
    }

    #[test]
    fn a_pod_that_says_too_much_is_not_heard_for_a_while() {
        let (mut said, start) = (Said::default(), Instant::now());
        let mut say = |number: usize, now| {
            let event = event("Noise", &number.to_string());
            let new = pod_event(&pod(), "n", &event);
            said.about(&pod(), &event, &new, now)
        };
        for number in 0..25 {
            assert_eq!(say(number, start), Saying::New);
        }
        assert_eq!(say(25, start), Saying::Silence);
        assert_eq!(say(26, start + REFILL), Saying::New);
    }
}
