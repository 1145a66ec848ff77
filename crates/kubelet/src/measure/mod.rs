//! What this node and its pods use, for the kubelet's API.
//!
//! Pods are measured by their sandboxes, which are asked when somebody wants to know and never otherwise. The node is what the
//! *job* has and uses of the machine (`node.rs`), for the rest belongs to others. `convert.rs` says all of it in upstream's words.

mod configuration;
mod convert;
mod node;
mod rates;

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{PodStats, StatsSummary};
use kubelet_api::stats::{LogLine, MachineInfo, MeasuredSummary, NodeSource};
use pod_protocol::usage::PodUsage;

use self::node::NodeMeter;
use self::rates::Rates;
use crate::pods::KnownPods;
use crate::{NodeConfig, SystemFacts};

/// A sandbox that takes longer is left out.
const PATIENCE: Duration = Duration::from_secs(5);

/// This node, as the kubelet's API asks for it.
pub(crate) struct Meter(Arc<Inner>);

struct Inner {
    config: NodeConfig,
    facts: SystemFacts,
    pods: Weak<KnownPods>,
    node: NodeMeter,
    rates: Rates,
}

impl Meter {
    pub(crate) fn new(config: &NodeConfig, facts: &SystemFacts, pods: &Arc<KnownPods>) -> Self {
        Self(Arc::new(Inner {
            config: config.clone(),
            facts: facts.clone(),
            pods: Arc::downgrade(pods),
            node: NodeMeter::new(config),
            rates: Rates::default(),
        }))
    }
}

impl NodeSource for Meter {
    fn measure(&self) -> BoxFuture<'static, MeasuredSummary> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { inner.measure().await })
    }

    fn machine(&self) -> MachineInfo {
        let Inner { config, facts, .. } = &*self.0;
        MachineInfo {
            node: config.name.clone(),
            cpus: config.capacity.cpus,
            memory_bytes: config.capacity.memory_bytes,
            machine_id: facts.machine_id.clone(),
            system_uuid: facts.system_uuid.clone(),
            boot_id: facts.boot_id.clone(),
            kubelet_version: config.kubelet_version.clone(),
            kernel_version: facts.kernel_version.clone(),
            os_version: facts.os_image.clone(),
        }
    }

    fn configuration(&self) -> serde_json::Value {
        configuration::of(&self.0.config)
    }

    fn is_in_sync(&self) -> bool {
        self.0.pods.upgrade().is_some_and(|pods| pods.is_followed())
    }

    fn log(&self) -> Vec<LogLine> {
        let pods = self.0.pods.upgrade();
        pods.map(|pods| pods.own_log()).unwrap_or_default()
    }
}

impl Inner {
    async fn measure(self: Arc<Self>) -> MeasuredSummary {
        let sandboxes = self.pods.upgrade().map(|pods| pods.sandboxes());
        let asked = sandboxes
            .unwrap_or_default()
            .into_iter()
            .map(|(pod, sandbox)| async {
                let usage = match sandbox {
                    Some(sandbox) => tokio::time::timeout(PATIENCE, sandbox.usage()).await,
                    None => return (pod, None),
                };
                (pod, usage.ok().and_then(Result::ok))
            });
        let answers: Vec<(Arc<Pod>, Option<PodUsage>)> = join_all(asked).await;
        let incomplete = answers
            .iter()
            .any(|(pod, usage)| usage.is_none() && is_running(pod));
        let mut measured: Vec<(Arc<Pod>, PodUsage)> = answers
            .into_iter()
            .filter_map(|(pod, usage)| Some((pod, usage?)))
            .collect();
        measured.sort_by_key(|(pod, _)| {
            let meta = &pod.metadata;
            (meta.namespace.clone(), meta.name.clone())
        });

        let inner = Arc::clone(&self);
        // Looking at all processes blocks.
        let summary = tokio::task::spawn_blocking(move || inner.sum_up(&measured)).await;
        match summary {
            Ok(summary) => MeasuredSummary {
                summary,
                incomplete,
            },
            Err(_) => MeasuredSummary {
                summary: self.sum_up(&[]),
                incomplete: true,
            },
        }
    }

    fn sum_up(&self, measured: &[(Arc<Pod>, PodUsage)]) -> StatsSummary {
        let now = Timestamp::now();
        let mut rates = self.rates.begin();
        let pods: Vec<PodStats> = measured
            .iter()
            .map(|(pod, usage)| convert::pod(pod, usage, &mut rates))
            .collect();
        let node = self.node.measure(&self.config, &pods, now, &mut rates);
        StatsSummary { node, pods }
    }
}

fn is_running(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    phase == Some("Running")
}
