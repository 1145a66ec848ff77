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

/// The prefix length of a node's pod range: enough addresses for 110 pods, and for terminating pods that they replace.
pub const NODE_PREFIX_LEN: u8 = 24;

/// Assigns to each node its share of the job's resources, its labels and a pod range of its own.
#[derive(Debug)]
pub struct NodePlanner {
    pod_cidr: PodCidr,
    labels: BTreeMap<String, String>,
    /// The owners of the pod ranges; the index determines the range. `None` is the free range of a removed node.
    owners: Vec<Option<RangeOwner>>,
}

/// A node that has a pod range.
#[derive(Debug)]
struct RangeOwner {
    node: String,
    /// The node was removed, but pods may still run there. No other node gets the range: two pods would have the same address.
    is_leaving: bool,
}

impl NodePlanner {
    /// A planner for a cluster that has no nodes yet.
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
            owners: Vec::new(),
        })
    }

    /// Plans nodes. A node that is in the cluster, or leaving it, keeps its pod range.
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
        let owner = self
            .owners
            .iter()
            .flatten()
            .find(|owner| owner.node == node);
        owner.is_some_and(|owner| !owner.is_leaving)
    }

    /// Removes a node from the cluster. Its pod range stays reserved until its pods have ended.
    pub fn remove(&mut self, node: &str) {
        let mut owners = self.owners.iter_mut().flatten();
        if let Some(owner) = owners.find(|owner| owner.node == node) {
            owner.is_leaving = true;
        }
    }

    /// Frees the pod range of a removed node: its pods have ended.
    pub fn release(&mut self, node: &str) {
        if let Some(index) = self.index(node)
            && !self.has(node)
        {
            self.owners[index] = None;
        }
    }

    fn index(&self, node: &str) -> Option<usize> {
        let is_node = |owner: &Option<RangeOwner>| {
            let owner = owner.as_ref();
            owner.is_some_and(|owner| owner.node == node)
        };
        self.owners.iter().position(is_node)
    }

    fn assign_pod_cidr(&mut self, node: &str) -> anyhow::Result<PodCidr> {
        let free = || self.owners.iter().position(Option::is_none);
        let index = self.index(node).or_else(free);
        let index = index.unwrap_or(self.owners.len());
        let subnet = u32::try_from(index)
            .ok()
            .and_then(|index| self.pod_cidr.node_subnet(index, NODE_PREFIX_LEN));
        let subnet = subnet.with_context(|| {
            format!(
                "--pod-cidr={} has too few addresses: every node needs a /{NODE_PREFIX_LEN} of it",
                self.pod_cidr
            )
        })?;
        let owner = Some(RangeOwner {
            node: node.to_owned(),
            is_leaving: false,
        });
        match self.owners.get_mut(index) {
            Some(entry) => *entry = owner,
            None => self.owners.push(owner),
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

/// Guesses the vendor's resource name from Slurm's GPU type, which each site chooses (`a100`, `mi250x`). AMD's models begin
/// with MI and a digit.
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
    fn pod_range_of_removed_node_is_reused_late() {
        let mut planner = NodePlanner {
            pod_cidr: "100.64.0.0/22".parse().unwrap(),
            labels: BTreeMap::new(),
            owners: Vec::new(),
        };
        let detail = JobDetail {
            job_id: 1,
            state: None,
            reason: None,
            partition: None,
            end_time: None,
            nodes: Vec::new(),
        };
        let ranges = |planner: &mut NodePlanner, nodes: &[&str]| {
            let nodes: Vec<_> = nodes.iter().map(|node| (*node).to_owned()).collect();
            let plans = planner.plan(&nodes, &detail).ok()?;
            let range = |node| plans[node].pod_cidr.trim_end_matches("/24").to_owned();
            Some(nodes.iter().map(range).collect::<Vec<_>>())
        };
        let expected = |ranges: &[&str]| Some(ranges.iter().map(|r| (*r).to_owned()).collect());
        let planner = &mut planner;
        assert_eq!(
            ranges(planner, &["a", "b"]),
            expected(&["100.64.0.0", "100.64.1.0"])
        );
        planner.remove("b");
        assert!(planner.has("a") && !planner.has("b"));
        assert_eq!(
            ranges(planner, &["a", "c"]),
            expected(&["100.64.0.0", "100.64.2.0"])
        );
        planner.release("b");
        assert_eq!(ranges(planner, &["d"]), expected(&["100.64.1.0"]));

        // A node that is added again before its pods have ended keeps its range.
        planner.remove("c");
        assert_eq!(ranges(planner, &["c"]), expected(&["100.64.2.0"]));
        planner.release("c");
        assert!(planner.has("c"));
        assert_eq!(ranges(planner, &["e"]), expected(&["100.64.3.0"]));
        assert_eq!(ranges(planner, &["f"]), None);
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
