//! The properties of nodes that the leader knows before they enrol.

use std::collections::{BTreeMap, HashMap};

use anyhow::Context;
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

/// The properties of each node of the allocation.
pub fn node_plans(
    allocation: &Allocation,
    detail: &JobDetail,
    cluster: &str,
    pod_cidr: &str,
) -> anyhow::Result<HashMap<String, NodePlan>> {
    let cluster_cidr: network::hub::PodCidr = pod_cidr.parse().map_err(anyhow::Error::msg)?;
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
    let plan = |(index, node): (usize, &String)| {
        let subnet = u32::try_from(index)
            .ok()
            .and_then(|index| cluster_cidr.node_subnet(index, NODE_PREFIX_LEN));
        let subnet = subnet.with_context(|| {
            format!("--pod-cidr={pod_cidr} has too few addresses: every node needs a /{NODE_PREFIX_LEN} of it")
        })?;
        let share = detail.nodes.iter().find(|share| share.node == *node);
        let plan = NodePlan {
            cpus: share.map_or(1, |share| share.cpus),
            memory_bytes: share.and_then(|share| share.memory_mb).map(|mb| mb << 20),
            extended: share.map(extended_resources).unwrap_or_default(),
            labels: labels.clone(),
            pod_cidr: subnet.to_string(),
        };
        Ok((node.clone(), plan))
    };
    allocation.nodes.iter().enumerate().map(plan).collect()
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
