//! From two looks at what was used ever, what is used now.

use std::collections::HashMap;

use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{ContainerStats, UsageStats, StatsSummary};

/// A rate over less is noise.
const LEAST_SECONDS: f64 = 1.0;

/// All nodes at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot(HashMap<String, StatsSummary>);

/// What something uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Usage {
    /// Billionths of a processor.
    pub nano_cores: u64,
    /// Bytes.
    pub memory: u64,
    /// When.
    pub at: Timestamp,
    /// Over how many seconds.
    pub window: f64,
}

/// What a pod uses.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodUsage {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub containers: Vec<(String, Usage)>,
}

/// What everything uses, by two looks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Now {
    pub nodes: HashMap<String, Usage>,
    pub pods: Vec<PodUsage>,
}

impl Snapshot {
    pub(crate) fn of(summaries: impl IntoIterator<Item = StatsSummary>) -> Self {
        let by_name = |summary: StatsSummary| (summary.node.node_name.clone(), summary);
        Self(summaries.into_iter().map(by_name).collect())
    }

    /// What is used between an earlier look and this one. What began in between counts from its beginning; what can't be told yet is left
    /// out, a pod as a whole.
    pub(crate) fn since(&self, earlier: &Self) -> Now {
        let mut now = Now::default();
        for (name, summary) in &self.0 {
            let before = earlier.0.get(name);
            let node = &summary.node;
            let usage = rate(&node.usage, before.map(|before| &before.node.usage));
            now.nodes.extend(usage.map(|usage| (name.clone(), usage)));

            let mut containers_before = HashMap::new();
            for pod in before.iter().flat_map(|before| &before.pods) {
                for container in &pod.containers {
                    let key = (pod.pod_ref.uid.as_str(), container.name.as_str());
                    containers_before.insert(key, &container.usage);
                }
            }
            for pod in &summary.pods {
                let uid = pod.pod_ref.uid.as_str();
                let of = |container: &ContainerStats| {
                    let before = containers_before.get(&(uid, container.name.as_str()));
                    let usage = rate(&container.usage, before.copied());
                    usage.map(|usage| (container.name.clone(), usage))
                };
                let containers: Option<Vec<_>> = pod.containers.iter().map(of).collect();
                let containers = containers.filter(|containers| !containers.is_empty());
                now.pods.extend(containers.map(|containers| PodUsage {
                    name: pod.pod_ref.name.clone(),
                    namespace: pod.pod_ref.namespace.clone(),
                    uid: uid.to_owned(),
                    containers,
                }));
            }
        }
        now
    }
}

fn rate(now: &UsageStats, before: Option<&UsageStats>) -> Option<Usage> {
    let (cpu, memory, started) = (now.cpu?, now.memory?, now.start_time);
    // One that was started again has begun anew.
    let before = before.filter(|before| before.start_time == started);
    let (from, used) = match before.and_then(|before| before.cpu) {
        Some(before) => (before.time, before.usage_core_nano_seconds),
        None => (started, 0),
    };
    let window = cpu.time.duration_since(from).as_secs_f64();
    let used = cpu.usage_core_nano_seconds.saturating_sub(used);
    (window >= LEAST_SECONDS).then(|| Usage {
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

    /// A node that began at 0, with one pod whose container began at `started`.
    pub(crate) fn look(second: i64, node_cpu: u64, started: i64, pod_cpu: u64) -> Snapshot {
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
        Snapshot::of([serde_json::from_value(summary).unwrap()])
    }

    #[test]
    fn rates_come_from_two_looks() {
        const SECOND: u64 = 1_000_000_000;
        let now =
            look(30, 60 * SECOND, 5, 20 * SECOND).since(&look(20, 40 * SECOND, 5, 15 * SECOND));
        let node = now.nodes["node1"];
        assert_eq!((node.nano_cores, node.memory), (2 * SECOND, 2048));
        let (name, main) = &now.pods[0].containers[0];
        assert_eq!((name.as_str(), main.nano_cores), ("main", SECOND / 2));
        assert_eq!(main.window, 10.0);
    }

    #[test]
    fn what_began_in_between_counts_from_its_beginning() {
        const SECOND: u64 = 1_000_000_000;
        let started_again = look(30, 0, 28, SECOND).since(&look(20, 0, 5, 15 * SECOND));
        assert_eq!(started_again.pods[0].containers[0].1.nano_cores, SECOND / 2);
        let new = look(30, 0, 28, SECOND).since(&Snapshot::default());
        assert_eq!(new.pods[0].containers[0].1.nano_cores, SECOND / 2);
        let too_new = look(30, 0, 30, SECOND).since(&Snapshot::default());
        assert_eq!(too_new.pods, []);
    }
}
