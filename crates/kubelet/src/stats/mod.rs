//! Statistics of this node and its pods, for the kubelet's API.
//!
//! Sandboxes measure their pods, and only on request (`pod.rs` converts their reports). The node's statistics cover only the
//! *job's* share of the machine (`node.rs`): the rest belongs to other users.

mod configz;
mod cpu_rates;
mod node;
mod pod;

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{PodStats, StatsSummary};
use kubelet_api::stats::{LogLine, MachineInfo, MeasuredSummary, NodeSource};
use pod_protocol::usage::PodUsage;

use self::cpu_rates::CpuRates;
use self::node::NodeStatsCollector;
use crate::pods::{PodManager, PodPhase};
use crate::{NodeConfig, SystemInfo};

/// A sandbox that does not report its usage in this time is left out.
const USAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Implements the kubelet API's source of node data.
pub(crate) struct StatsProvider(Arc<Inner>);

struct Inner {
    config: NodeConfig,
    system: SystemInfo,
    pods: Weak<PodManager>,
    node: NodeStatsCollector,
    rates: CpuRates,
}

impl StatsProvider {
    pub(crate) fn new(config: &NodeConfig, system: &SystemInfo, pods: &Arc<PodManager>) -> Self {
        Self(Arc::new(Inner {
            config: config.clone(),
            system: system.clone(),
            pods: Arc::downgrade(pods),
            node: NodeStatsCollector::new(config),
            rates: CpuRates::default(),
        }))
    }
}

impl NodeSource for StatsProvider {
    fn measure(&self) -> BoxFuture<'static, MeasuredSummary> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { inner.measure().await })
    }

    fn machine(&self) -> MachineInfo {
        let Inner { config, system, .. } = &*self.0;
        MachineInfo {
            node: config.name.clone(),
            cpus: config.capacity.cpus,
            memory_bytes: config.capacity.memory_bytes,
            machine_id: system.machine_id.clone(),
            system_uuid: system.system_uuid.clone(),
            boot_id: system.boot_id.clone(),
            kubelet_version: config.kubelet_version.clone(),
            kernel_version: system.kernel_version.clone(),
            os_version: system.os_image.clone(),
        }
    }

    fn configuration(&self) -> serde_json::Value {
        configz::kubelet_configuration(&self.0.config)
    }

    fn is_in_sync(&self) -> bool {
        self.0
            .pods
            .upgrade()
            .is_some_and(|pods| pods.is_sync_loop_running())
    }

    fn log(&self) -> Vec<LogLine> {
        let pods = self.0.pods.upgrade();
        pods.map(|pods| pods.agent_log()).unwrap_or_default()
    }
}

impl Inner {
    async fn measure(self: Arc<Self>) -> MeasuredSummary {
        let sandboxes = self.pods.upgrade().map(|pods| pods.pods_with_sandboxes());
        let requests = sandboxes
            .unwrap_or_default()
            .into_iter()
            .map(|(pod, sandbox)| async {
                let usage = match sandbox {
                    Some(sandbox) => tokio::time::timeout(USAGE_TIMEOUT, sandbox.usage()).await,
                    None => return (pod, None),
                };
                (pod, usage.ok().and_then(Result::ok))
            });
        let reports: Vec<(Arc<Pod>, Option<PodUsage>)> = join_all(requests).await;
        let incomplete = reports
            .iter()
            .any(|(pod, usage)| usage.is_none() && is_running(pod));
        let mut measured: Vec<(Arc<Pod>, PodUsage)> = reports
            .into_iter()
            .filter_map(|(pod, usage)| Some((pod, usage?)))
            .collect();
        measured.sort_by_key(|(pod, _)| {
            let meta = &pod.metadata;
            (meta.namespace.clone(), meta.name.clone())
        });

        let inner = Arc::clone(&self);
        // Reading all processes blocks.
        let summary = tokio::task::spawn_blocking(move || inner.summarize(&measured)).await;
        match summary {
            Ok(summary) => MeasuredSummary {
                summary,
                incomplete,
            },
            Err(_) => MeasuredSummary {
                summary: self.summarize(&[]),
                incomplete: true,
            },
        }
    }

    fn summarize(&self, measured: &[(Arc<Pod>, PodUsage)]) -> StatsSummary {
        let now = Timestamp::now();
        let mut rates = self.rates.begin_round();
        let pods: Vec<PodStats> = measured
            .iter()
            .map(|(pod, usage)| pod::pod_stats(pod, usage, &mut rates))
            .collect();
        let node = self.node.measure(&self.config, &pods, now, &mut rates);
        StatsSummary { node, pods }
    }
}

fn is_running(pod: &Pod) -> bool {
    PodPhase::of(pod.status.as_ref()) == PodPhase::Running
}
