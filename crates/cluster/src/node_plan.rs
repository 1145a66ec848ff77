//! The properties of nodes that the leader knows before they enrol.

use std::collections::{BTreeMap, HashMap};

use anyhow::Context;
use network::hub::PodCidr;
use slurm::{Allocation, JobDetail};

/// The resources, labels and pod range of a node.
#[derive(Debug, Clone, Default)]
pub struct NodePlan {
    /// CPUs that are allocated to the job.
    pub cpus: u32,
    /// Memory that is allocated to the job.
    pub memory_bytes: Option<u64>,
    /// Other resources, by their Kubernetes names.
    pub extended: BTreeMap<String, u64>,
    /// Labels of the Node.
    pub labels: BTreeMap<String, String>,
    /// Its pod range.
    pub pod_cidr: String,
}

/// The length of a node's prefix: enough addresses for the 110 pods that it takes, some of them ending.
pub const NODE_PREFIX_LEN: u8 = 24;

/// Plans nodes: gives each its share of the job and a pod range of its own.
#[derive(Debug)]
pub struct NodePlanner {
    pod_cidr: PodCidr,
    labels: BTreeMap<String, String>,
    /// The nodes of the cluster; the index determines the pod range. `None` is a range that a removed node had.
    nodes: Vec<Option<String>>,
}

impl NodePlanner {
    /// A planner for the nodes of a cluster, which has none yet.
    pub fn new(
        allocation: &Allocation,
        detail: &JobDetail,
        cluster: &str,
        pod_cidr: &str,
    ) -> anyhow::Result<NodePlanner> {
        let mut labels = BTreeMap::from([
            ("coracle.dev/cluster".to_owned(), cluster.to_owned()),
            (
                "coracle.dev/job-id".to_owned(),
                allocation.job_id.to_string(),
            ),
        ]);
        if let Some(partition) = detail.partition.as_ref().or(allocation.partition.as_ref()) {
            labels.insert("coracle.dev/partition".to_owned(), partition.clone());
        }
        Ok(NodePlanner {
            pod_cidr: pod_cidr.parse().map_err(anyhow::Error::msg)?,
            labels,
            nodes: Vec::new(),
        })
    }

    /// Plans nodes. A node that is in the cluster keeps its pod range.
    pub fn plan(
        &mut self,
        nodes: &[String],
        detail: &JobDetail,
    ) -> anyhow::Result<HashMap<String, NodePlan>> {
        let plan = |node: &String| {
            let share = detail.nodes.iter().find(|share| share.node == *node);
            let plan = NodePlan {
                cpus: share.map_or(1, |share| share.cpus),
                memory_bytes: share.and_then(|share| share.memory_mb).map(|mb| mb << 20),
                extended: share.map(extended_resources).unwrap_or_default(),
                labels: self.labels.clone(),
                pod_cidr: self.assign_pod_cidr(node)?.to_string(),
            };
            Ok((node.clone(), plan))
        };
        nodes.iter().map(plan).collect()
    }

    /// Whether the cluster has this node.
    pub fn has(&self, node: &str) -> bool {
        self.index(Some(node)).is_some()
    }

    /// Removes a node from the cluster, and frees its pod range.
    pub fn release(&mut self, node: &str) {
        if let Some(index) = self.index(Some(node)) {
            self.nodes[index] = None;
        }
    }

    fn index(&self, node: Option<&str>) -> Option<usize> {
        self.nodes.iter().position(|entry| entry.as_deref() == node)
    }

    fn assign_pod_cidr(&mut self, node: &str) -> anyhow::Result<PodCidr> {
        let index = self.index(Some(node)).or_else(|| self.index(None));
        let index = index.unwrap_or(self.nodes.len());
        let subnet = u32::try_from(index)
            .ok()
            .and_then(|index| self.pod_cidr.node_subnet(index, NODE_PREFIX_LEN));
        let subnet = subnet.with_context(|| {
            format!(
                "--pod-cidr={} has too few addresses: every node needs a /{NODE_PREFIX_LEN} of it",
                self.pod_cidr
            )
        })?;
        match self.nodes.get_mut(index) {
            Some(entry) => *entry = Some(node.to_owned()),
            None => self.nodes.push(Some(node.to_owned())),
        }
        Ok(subnet)
    }
}

/// Slurm's generic resources under the names that Kubernetes manifests use.
fn extended_resources(share: &slurm::NodeShare) -> BTreeMap<String, u64> {
    let mut extended = BTreeMap::new();
    for gres in &share.gres {
        let name = match gres.name.as_str() {
            "gpu" => gpu_name(gres.kind.as_deref()).to_owned(),
            other => format!("coracle.dev/{other}"),
        };
        *extended.entry(name).or_default() += gres.count;
    }
    extended
}

/// The type of a GPU in Slurm is the site's choice (`a100`, `mi250x`). Types of AMD's GPUs begin with MI and a number.
fn gpu_name(kind: Option<&str>) -> &'static str {
    let kind = kind.unwrap_or_default().to_ascii_lowercase();
    let is_instinct = kind
        .strip_prefix("mi")
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if is_instinct || kind.contains("amd") || kind.contains("instinct") {
        "amd.com/gpu"
    } else {
        "nvidia.com/gpu"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_range_of_removed_node_is_used_again() {
        let mut planner = NodePlanner {
            pod_cidr: "100.64.0.0/22".parse().unwrap(),
            labels: BTreeMap::new(),
            nodes: Vec::new(),
        };
        let detail = JobDetail {
            job_id: 1,
            state: None,
            reason: None,
            partition: None,
            end_time: None,
            nodes: Vec::new(),
        };
        let mut ranges = |nodes: &[&str], removed: &[&str]| {
            removed.iter().for_each(|node| planner.release(node));
            let nodes: Vec<_> = nodes.iter().map(|node| (*node).to_owned()).collect();
            let plans = planner.plan(&nodes, &detail).ok()?;
            let range = |node| plans[node].pod_cidr.trim_end_matches("/24").to_owned();
            Some(nodes.iter().map(range).collect::<Vec<_>>())
        };
        let expected = |ranges: &[&str]| Some(ranges.iter().map(|r| (*r).to_owned()).collect());
        assert_eq!(
            ranges(&["a", "b", "c"], &[]),
            expected(&["100.64.0.0", "100.64.1.0", "100.64.2.0"])
        );
        assert_eq!(
            ranges(&["c", "d"], &["b"]),
            expected(&["100.64.2.0", "100.64.1.0"])
        );
        assert_eq!(ranges(&["e"], &[]), expected(&["100.64.3.0"]));
        assert_eq!(ranges(&["f"], &[]), None);
    }

    #[test]
    fn gpu_resource_has_vendor_name() {
        for (kind, name) in [
            (None, "nvidia.com/gpu"),
            (Some("a100"), "nvidia.com/gpu"),
            (Some("mi250x"), "amd.com/gpu"),
            (Some("amd_instinct"), "amd.com/gpu"),
            (Some("mig-1g.5gb"), "nvidia.com/gpu"),
        ] {
            assert_eq!(gpu_name(kind), name, "{kind:?}");
        }
    }
}
