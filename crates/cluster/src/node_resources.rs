//! Describes the resources of a cluster's nodes, and notices an allocation that is too small for most pods.

use std::fmt::Display;

use slurm::NodeShare;

/// Below this, a node has Slurm's defaults rather than resources that the user chose.
const FEW_CPUS: u32 = 2;
const LITTLE_MEMORY_MB: u64 = 1000;

/// The resources per node, such as `2 CPUs and 2000 MB each`; empty if they are unknown.
pub fn describe(shares: &[NodeShare]) -> String {
    let Some(cpus) = range(shares.iter().map(|share| share.cpus)) else {
        return String::new();
    };
    let memory = shares.iter().map(|share| share.memory_mb);
    let memory = match memory.collect::<Option<Vec<u64>>>().and_then(range) {
        Some(memory) => format!("{memory} MB"),
        None => "unlimited memory".to_owned(),
    };
    let plural = if cpus == "1" { "" } else { "s" };
    let gpus = shares.iter().map(|share| share.gres_total("gpu"));
    let gpus = match range(gpus) {
        Some(gpus) if gpus != "0" => format!(", GPUs: {gpus}"),
        _ => String::new(),
    };
    let each = if shares.len() > 1 { " each" } else { "" };
    format!("{cpus} CPU{plural} and {memory}{each}{gpus}")
}

/// How to get more, if the nodes have only what Slurm gives by default.
pub fn hint(shares: &[NodeShare]) -> Option<&'static str> {
    let is_small = |share: &NodeShare| {
        share.cpus < FEW_CPUS || share.memory_mb.is_some_and(|mb| mb < LITTLE_MEMORY_MB)
    };
    shares.iter().any(is_small).then_some(
        "this is little for pods: Slurm's options --exclusive and --mem=0 request whole nodes, -c CPUS and --mem=SIZE a part",
    )
}

/// `2`, or `1 to 4` if the values differ; `None` without values.
fn range<T: Ord + Display>(values: impl IntoIterator<Item = T>) -> Option<String> {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort();
    match (values.first()?, values.last()?) {
        (low, high) if low == high => Some(low.to_string()),
        (low, high) => Some(format!("{low} to {high}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(cpus: u32, memory_mb: Option<u64>, gres: &str) -> NodeShare {
        NodeShare {
            node: "node1".to_owned(),
            cpus,
            memory_mb,
            gres: slurm::parse_gres(gres),
        }
    }

    #[test]
    fn resources_of_nodes_are_described() {
        let cases = [
            (vec![share(1, Some(500), "")], "1 CPU and 500 MB", true),
            (
                vec![share(8, Some(8000), "gpu:2"), share(8, Some(8000), "gpu:2")],
                "8 CPUs and 8000 MB each, GPUs: 2",
                false,
            ),
            (
                vec![share(2, Some(500), ""), share(4, Some(2000), "gpu:a100:1")],
                "2 to 4 CPUs and 500 to 2000 MB each, GPUs: 0 to 1",
                true,
            ),
            (
                vec![share(2, None, "")],
                "2 CPUs and unlimited memory",
                false,
            ),
            (vec![], "", false),
        ];
        for (shares, expected, has_hint) in cases {
            assert_eq!(describe(&shares), expected);
            assert_eq!(hint(&shares).is_some(), has_hint, "{expected}");
        }
    }
}
