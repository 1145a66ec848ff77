//! The task that watches a workload's objects.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Duration;

use console::print_stderr;
use futures::stream::{BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event as WatchEvent, watcher};
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::give_up::StuckPods;
use super::replicas::{Controller, ReplicaProgress};
use super::state::{Replicas, WorkloadState};
use super::summary::{duration_text, object_lines};
use super::tracked::ObjectChange;
use super::warnings::Warnings;
use super::{ProgressOptions, WorkloadOutcome};
use crate::commands::run::object_ref::ObjectRef;
use crate::commands::run::pod_logs::PodLogs;
use crate::commands::run::pod_logs::printable;

/// Interval of checks that depend on time.
const TICK: Duration = Duration::from_millis(500);
/// Time to read the logs of ended pods completely before the cluster ends.
const LOGS_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to receive the rest of open streams after the nodes have ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// A pod that cannot run is mentioned after this time: most obstacles disappear within it.
const STUCK_NOTICE: Duration = Duration::from_secs(6);
/// Pods that a message names.
const MAX_NAMED_PODS: usize = 3;

/// A request of the leader.
pub enum ObserverRequest {
    /// The pods are stopped now, within this time.
    BeginStop(Duration),
    /// The nodes have ended, for this reason.
    Finish(String),
}

/// A change of a watched object.
enum WatchedChange {
    Pod(Box<WatchEvent<Pod>>),
    Job(Box<WatchEvent<Job>>),
    Replicas(ObjectRef, Option<Replicas>),
    Warning(Box<Event>),
}

/// Observes a workload.
pub struct Observer {
    client: Client,
    namespaces: BTreeSet<String>,
    state: WorkloadState,
    logs: PodLogs,
    changes: SelectAll<BoxStream<'static, WatchedChange>>,
    warnings: Warnings,
    replicas: ReplicaProgress,
    stuck: StuckPods,
    give_up_after: Option<Duration>,
    has_mentioned_stuck: bool,
    reported: BTreeSet<ObjectRef>,
    began: Instant,
    /// The summary, made when the pods were stopped.
    summary: Option<Vec<String>>,
}

impl Observer {
    /// Starts the watches.
    pub fn new(client: Client, applied: Vec<ObjectRef>, options: ProgressOptions) -> Self {
        let state = WorkloadState::new(applied);
        let namespaces = state.namespaces();
        let mut style = options.logs;
        style.shows_namespace = namespaces.len() > 1;
        Self {
            changes: watch_all(&client, &state),
            logs: PodLogs::new(client.clone(), style),
            client,
            namespaces,
            state,
            warnings: Warnings::default(),
            replicas: ReplicaProgress::default(),
            stuck: StuckPods::default(),
            give_up_after: options.give_up_after,
            has_mentioned_stuck: false,
            reported: BTreeSet::new(),
            began: Instant::now(),
            summary: None,
        }
    }

    /// Observes until [`ObserverRequest::Finish`].
    pub async fn run(
        mut self,
        outcome: oneshot::Sender<WorkloadOutcome>,
        mut requests: mpsc::Receiver<ObserverRequest>,
    ) {
        let mut outcome = Some(outcome);
        if !self.state.has_ending_objects() && self.state.has_endless_objects() {
            print_stderr(format_args!(
                "coracle: nothing in these manifests ends by itself; end the cluster with Ctrl-C or scancel"
            ));
        }
        let mut tick = tokio::time::interval(TICK);
        let reason = loop {
            if outcome.is_some() && self.summary.is_none() && self.has_ended() {
                let sender = outcome.take();
                let succeeded = !self.state.has_failed();
                tokio::select! {
                    () = self.settle() => {}
                    request = requests.recv() => match request {
                        Some(ObserverRequest::BeginStop(timeout)) => self.begin_stop(timeout),
                        Some(ObserverRequest::Finish(reason)) => break reason,
                        None => return,
                    }
                }
                let _ = sender.map(|sender| sender.send(WorkloadOutcome::Done { succeeded }));
            }
            tokio::select! {
                Some(change) = self.changes.next() => self.handle(change),
                _ = tick.tick() => {
                    if let Some(reason) = self.check_time() {
                        let sender = outcome.take();
                        let _ = sender.map(|sender| sender.send(WorkloadOutcome::GaveUp { reason }));
                    }
                }
                request = requests.recv() => match request {
                    Some(ObserverRequest::BeginStop(timeout)) => self.begin_stop(timeout),
                    Some(ObserverRequest::Finish(reason)) => break reason,
                    None => return,
                }
            }
        };
        self.finish(&reason).await;
    }

    fn has_ended(&self) -> bool {
        match self.state.has_ending_objects() {
            true => self.state.is_done(),
            false => !self.state.has_endless_objects(),
        }
    }

    fn handle(&mut self, change: WatchedChange) {
        match change {
            WatchedChange::Pod(event) => {
                for change in self.state.handle_pod(*event) {
                    let (pod, is_deleted) = match &change {
                        ObjectChange::Applied(pod) => (pod, false),
                        ObjectChange::Deleted(pod) => (pod, true),
                    };
                    if self.is_ours(pod.namespace()) {
                        self.logs.update(pod, is_deleted);
                    }
                }
            }
            WatchedChange::Job(event) => self.state.handle_job(*event),
            WatchedChange::Replicas(object, replicas) => {
                if let Some(replicas) = replicas
                    && self.state.applied.contains(&object)
                {
                    self.state.replicas.insert(object, replicas);
                    self.print_replicas();
                }
            }
            WatchedChange::Warning(event) => {
                if self.is_ours(event.involved_object.namespace.clone()) {
                    self.warnings.hold(*event, Instant::now());
                }
            }
        }
        self.print_results();
    }

    fn is_ours(&self, namespace: Option<String>) -> bool {
        self.namespaces.contains(&namespace.unwrap_or_default())
    }

    /// Prints what depends on time. Returns a reason to give up.
    fn check_time(&mut self) -> Option<String> {
        if self.summary.is_some() {
            return None;
        }
        let now = Instant::now();
        for line in self.warnings.due(&self.state.pods, now) {
            print_stderr(format_args!("coracle: {line}"));
        }
        self.print_replicas();
        let limit = self.give_up_after?;
        self.stuck.update(&self.state, now);
        let stuck = self.stuck.longer_than(STUCK_NOTICE.min(limit), now);
        if stuck.is_empty() {
            self.has_mentioned_stuck = false;
        } else if !self.has_mentioned_stuck {
            self.has_mentioned_stuck = true;
            print_stderr(format_args!(
                "coracle: {} cannot run; giving up {} after the first failure (--give-up-after)",
                count_pods(stuck.len()),
                duration_text(limit)
            ));
        }
        let hopeless = self.stuck.longer_than(limit, now);
        let named: Vec<String> = hopeless
            .iter()
            .take(MAX_NAMED_PODS)
            .map(|(pod, obstacle)| printable(&format!("{pod}: {}", obstacle.text)))
            .collect();
        (!hopeless.is_empty()).then(|| {
            format!(
                "{} could not run for {}: {}",
                count_pods(hopeless.len()),
                duration_text(limit),
                named.join("; ")
            )
        })
    }

    fn print_replicas(&mut self) {
        if self.summary.is_some() {
            return;
        }
        for (object, replicas) in &self.state.replicas {
            if let Some(line) = self.replicas.line(object, *replicas, Instant::now()) {
                print_stderr(format_args!("coracle: {line}"));
            }
        }
    }

    /// Prints the results of objects as they end. Results of the end of the cluster are no results of the workload.
    fn print_results(&mut self) {
        if self.summary.is_some() {
            return;
        }
        for (object, result) in &self.state.results {
            if self.reported.insert(object.clone()) {
                let verb = if result.succeeded {
                    "succeeded"
                } else {
                    "failed"
                };
                print_stderr(format_args!("coracle: {object} {verb}"));
            }
        }
    }

    /// Reads the logs of ended pods completely.
    async fn settle(&mut self) {
        let read = async {
            // The watch of pods may be later than that of Jobs.
            for namespace in &self.namespaces {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
                for pod in pods
                    .list(&ListParams::default())
                    .await
                    .into_iter()
                    .flatten()
                {
                    self.logs.update(&pod, false);
                    self.state.handle_pod(WatchEvent::Apply(pod));
                }
            }
            self.logs.wait_for_ended_pods().await;
        };
        if tokio::time::timeout(LOGS_TIMEOUT, read).await.is_err() {
            print_stderr(format_args!(
                "coracle: warning: some logs could not be read completely within {}",
                duration_text(LOGS_TIMEOUT)
            ));
        }
    }

    fn begin_stop(&mut self, timeout: Duration) {
        if self.summary.is_some() {
            return;
        }
        let last_lines = self.logs.last_lines();
        let last_lines = last_lines.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = object_lines(&self.state, &last_lines, Timestamp::now());
        drop(last_lines);
        self.summary = Some(lines);
        if self.state.running_pods() > 0 {
            print_stderr(format_args!(
                "coracle: stopping pods, up to {}",
                duration_text(timeout)
            ));
        }
    }

    async fn finish(mut self, reason: &str) {
        self.begin_stop(Duration::ZERO);
        self.logs.close(CLOSE_TIMEOUT).await;
        for line in self.summary.unwrap_or_default() {
            print_stderr(format_args!("coracle:   {line}"));
        }
        print_stderr(format_args!(
            "coracle: the cluster ended after {}: {reason}",
            duration_text(self.began.elapsed())
        ));
    }
}

fn count_pods(count: usize) -> String {
    format!("{count} pod{}", if count == 1 { "" } else { "s" })
}

/// The watches that these objects need.
fn watch_all(
    client: &Client,
    state: &WorkloadState,
) -> SelectAll<BoxStream<'static, WatchedChange>> {
    let has = |kind: &str| state.applied.iter().any(|object| object.kind == kind);
    let mut all = SelectAll::new();
    all.push(watch(client, |event| WatchedChange::Pod(Box::new(event))));
    if has("Job") {
        all.push(watch(client, |event| WatchedChange::Job(Box::new(event))));
    }
    if has(Deployment::KIND) {
        all.push(watch_replicas::<Deployment>(client));
    }
    if has(StatefulSet::KIND) {
        all.push(watch_replicas::<StatefulSet>(client));
    }
    if has(DaemonSet::KIND) {
        all.push(watch_replicas::<DaemonSet>(client));
    }
    let warnings = watcher::Config::default().fields("type=Warning");
    let warnings = watcher(Api::<Event>::all(client.clone()), warnings)
        .default_backoff()
        .applied_objects()
        .filter_map(async |event| Some(WatchedChange::Warning(Box::new(event.ok()?))));
    all.push(warnings.boxed());
    all
}

/// Watches all objects of a kind. Retries while the API server restarts.
fn watch<K>(
    client: &Client,
    change: impl Fn(WatchEvent<K>) -> WatchedChange + Send + 'static,
) -> BoxStream<'static, WatchedChange>
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    watcher(Api::<K>::all(client.clone()), watcher::Config::default())
        .default_backoff()
        .modify(|object| object.managed_fields_mut().clear())
        .filter_map(async |event| match event {
            Ok(event) => Some(event),
            Err(error) => {
                tracing::info!(%error, "the watch broke; watching again");
                None
            }
        })
        .map(change)
        .boxed()
}

fn watch_replicas<K>(client: &Client) -> BoxStream<'static, WatchedChange>
where
    K: Controller
        + kube::Resource<DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    watcher(Api::<K>::all(client.clone()), watcher::Config::default())
        .default_backoff()
        .applied_objects()
        .filter_map(async |object| {
            let object = object.ok()?;
            let namespace = object.namespace().unwrap_or_default();
            let name = ObjectRef::new(K::KIND, &namespace, &object.name_any());
            Some(WatchedChange::Replicas(name, object.replicas()))
        })
        .boxed()
}
