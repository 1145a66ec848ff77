//! Computes current usage from two samples of cumulative counters.

use std::collections::HashMap;

use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{ContainerStats, StatsSummary, UsageStats};

/// Shortest window for a rate, in seconds. Shorter ones are too inaccurate.
const MIN_WINDOW: f64 = 1.0;

/// The stats summaries of all nodes at one time, by node name.
#[derive(Clone, Debug, Default)]
pub(crate) struct CounterSample(HashMap<String, StatsSummary>);

/// The usage of a node or container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ResourceUsage {
    /// CPU usage, in billionths of a core.
    pub nano_cores: u64,
    /// Working set, in bytes.
    pub memory: u64,
    /// End of the window.
    pub at: Timestamp,
    /// Length of the window, in seconds.
    pub window: f64,
}

/// The usage of a pod's containers, by name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodMetrics {
    pub uid: String,
    pub containers: Vec<(String, ResourceUsage)>,
}

/// The usage of all nodes, by name, and of all pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterUsage {
    pub nodes: HashMap<String, ResourceUsage>,
    pub pods: Vec<PodMetrics>,
}

impl CounterSample {
    pub(crate) fn new(summaries: impl IntoIterator<Item = StatsSummary>) -> Self {
        let by_name = |summary: StatsSummary| (summary.node.node_name.clone(), summary);
        Self(summaries.into_iter().map(by_name).collect())
    }

    /// The usage between an earlier sample and this one. A container that started in between counts from its start. If the
    /// window of one container is too short, its whole pod is left out.
    pub(crate) fn usage_since(&self, earlier: &Self) -> ClusterUsage {
        let mut cluster = ClusterUsage::default();
        for (name, summary) in &self.0 {
            let before = earlier.0.get(name);
            let node = &summary.node;
            let usage = rate(&node.usage, before.map(|before| &before.node.usage));
            cluster
                .nodes
                .extend(usage.map(|usage| (name.clone(), usage)));

            let mut containers_before = HashMap::new();
            for pod in before.iter().flat_map(|before| &before.pods) {
                for container in &pod.containers {
                    let key = (pod.pod_ref.uid.as_str(), container.name.as_str());
                    containers_before.insert(key, &container.usage);
                }
            }
            for pod in &summary.pods {
                let uid = pod.pod_ref.uid.as_str();
                let container_usage = |container: &ContainerStats| {
                    let before = containers_before.get(&(uid, container.name.as_str()));
                    let usage = rate(&container.usage, before.copied());
                    usage.map(|usage| (container.name.clone(), usage))
                };
                let containers: Option<Vec<_>> =
                    pod.containers.iter().map(container_usage).collect();
                let containers = containers.filter(|containers| !containers.is_empty());
                cluster.pods.extend(containers.map(|containers| PodMetrics {
                    uid: uid.to_owned(),
                    containers,
                }));
            }
        }
        cluster
    }
}

fn rate(now: &UsageStats, before: Option<&UsageStats>) -> Option<ResourceUsage> {
    let (cpu, memory, started) = (now.cpu?, now.memory?, now.start_time);
    // A restarted container has new counters.
    let before = before.filter(|before| before.start_time == started);
    let (from, used) = match before.and_then(|before| before.cpu) {
        Some(before) => (before.time, before.usage_core_nano_seconds),
        None => (started, 0),
    };
    let window = cpu.time.duration_since(from).as_secs_f64();
    let used = cpu.usage_core_nano_seconds.saturating_sub(used);
    (window >= MIN_WINDOW).then(|| ResourceUsage {
        nano_cores: (used as f64 / window) as u64,
        memory: memory.working_set_bytes,
        at: cpu.time,
        window,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    /// A node that started at 0, with one pod whose container started at `started`.
    pub(crate) fn sample(second: i64, node_cpu: u64, started: i64, pod_cpu: u64) -> CounterSample {
        let cpu = |ns: u64| json!({"time": at(second), "usageCoreNanoSeconds": ns});
        let memory = json!({"time": at(second), "usageBytes": 4096, "workingSetBytes": 2048, "rssBytes": 1024,
            "pageFaults": 0, "majorPageFaults": 0});
        let summary = json!({
            "node": {"nodeName": "node1", "startTime": at(0), "cpu": cpu(node_cpu), "memory": memory},
            "pods": [{
                "podRef": {"name": "web", "namespace": "default", "uid": "u1"},
                "startTime": at(started),
                "containers": [{"name": "main", "startTime": at(started), "cpu": cpu(pod_cpu), "memory": memory}],
            }],
        });
        CounterSample::new([serde_json::from_value(summary).unwrap()])
    }

    #[test]
    fn rates_come_from_two_samples() {
        const SECOND: u64 = 1_000_000_000;
        let now = sample(30, 60 * SECOND, 5, 20 * SECOND).usage_since(&sample(
            20,
            40 * SECOND,
            5,
            15 * SECOND,
        ));
        let node = now.nodes["node1"];
        assert_eq!((node.nano_cores, node.memory), (2 * SECOND, 2048));
        let (name, main) = &now.pods[0].containers[0];
        assert_eq!((name.as_str(), main.nano_cores), ("main", SECOND / 2));
        assert_eq!(main.window, 10.0);
    }

    #[test]
    fn restarted_containers_count_from_their_start() {
        const SECOND: u64 = 1_000_000_000;
        let restarted = sample(30, 0, 28, SECOND).usage_since(&sample(20, 0, 5, 15 * SECOND));
        assert_eq!(restarted.pods[0].containers[0].1.nano_cores, SECOND / 2);
        let new = sample(30, 0, 28, SECOND).usage_since(&CounterSample::default());
        assert_eq!(new.pods[0].containers[0].1.nano_cores, SECOND / 2);
        let too_new = sample(30, 0, 30, SECOND).usage_since(&CounterSample::default());
        assert_eq!(too_new.pods, []);
    }
}
