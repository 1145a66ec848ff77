//! The user's running clusters, for the commands that work with one: `logs`, `kubectl`, `shell` and `kubeconfig`.
//!
//! ```text
//!   local.rs    finds clusters on this host by their control plane's processes
//!   remote.rs   finds them with Slurm, and runs this program on the leader's node
//!   access.rs   the kubeconfig of a cluster on any host, and kubectl
//! ```

pub mod access;
mod local;
mod remote;

use console::{Failure, FailureCode};

use clap::Args;
use clap_complete::engine::ArgValueCandidates;

use crate::completion_values;

pub use self::local::{LocalCluster, job_of};
pub use self::remote::{StepOutput, run_on_leader_node};

/// Set in the environment of workloads and of `coracle shell`: the cluster's name.
pub const NAME_VARIABLE: &str = "K8S_CLUSTER_NAME";

/// Selects one of the user's clusters.
#[derive(Debug, Clone, Default, Args)]
pub struct ClusterSelector {
    /// The job of the cluster, if you have several
    #[arg(short, long, value_name = "ID", add = ArgValueCandidates::new(completion_values::cluster_jobs))]
    pub job: Option<u32>,
    /// The name of the cluster, if its job has several
    #[arg(long, value_name = "CLUSTER")]
    pub name: Option<String>,
    /// Search this host only
    #[arg(long, hide = true)]
    pub here: bool,
}

impl ClusterSelector {
    /// Selects the cluster of the environment, in a workload or in `coracle shell`, if the user selects none.
    pub fn or_enclosing(mut self) -> Self {
        if self.job.is_none() && self.name.is_none() {
            self.name = enclosing_cluster();
        }
        self
    }

    /// The job of the cluster, if it is known.
    fn job(&self) -> Option<u32> {
        let of_name = || self.name.as_deref().and_then(job_of);
        self.job.or_else(of_name)
    }

    /// The same selection, as arguments of this program on the leader's node.
    fn remote_args(&self, job: u32) -> Vec<String> {
        let name = self.name.iter().map(|name| format!("--name={name}"));
        ["--here".to_owned(), format!("--job={job}")]
            .into_iter()
            .chain(name)
            .collect()
    }
}

/// The cluster whose workload or shell this process is in.
pub fn enclosing_cluster() -> Option<String> {
    let name = std::env::var(NAME_VARIABLE).ok()?;
    job_of(&name).map(|_| name)
}

/// The selected cluster if its leader runs on this host; `None` if other hosts have to be searched.
pub fn find_here(selector: &ClusterSelector) -> Result<Option<LocalCluster>, Failure> {
    match select(local::find(), selector)? {
        None if selector.here => Err(Failure::new(
            FailureCode::NoWorkload,
            "no running cluster found on this host",
        )
        .with_hint("it may just be starting or ending: `squeue --me` shows your jobs")),
        found => Ok(found),
    }
}

fn select(
    mut clusters: Vec<LocalCluster>,
    selector: &ClusterSelector,
) -> Result<Option<LocalCluster>, Failure> {
    clusters.retain(|cluster| {
        (selector.job.is_none() || cluster.job == selector.job)
            && selector
                .name
                .as_ref()
                .is_none_or(|name| cluster.name == *name)
    });
    match clusters.len() {
        0 | 1 => Ok(clusters.pop()),
        _ => Err(ambiguous(&clusters)),
    }
}

fn ambiguous(clusters: &[LocalCluster]) -> Failure {
    let names = clusters.iter().map(|cluster| cluster.name.as_str());
    let names: Vec<&str> = names.collect();
    let message = format!(
        "you have {} clusters on this host: {}",
        clusters.len(),
        names.join(", ")
    );
    let hint = format!("choose one, for example with --name {}", names[0]);
    Failure::new(FailureCode::Usage, message).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(job: Option<u32>, name: Option<&str>) -> ClusterSelector {
        ClusterSelector {
            job,
            name: name.map(str::to_owned),
            here: false,
        }
    }

    fn select_of(names: &[&str], selector: &ClusterSelector) -> Result<Option<String>, String> {
        let clusters = names.iter().map(|name| LocalCluster::named(name));
        let selected = select(clusters.collect(), selector);
        selected
            .map(|cluster| cluster.map(|cluster| cluster.name))
            .map_err(|failure| format!("{failure}; {}", failure.hint().unwrap_or_default()))
    }

    #[test]
    fn clusters_of_one_job_are_selected_by_name() {
        let names = ["coracle-61-aaaa", "coracle-61-bbbb", "coracle-62-cccc"];
        let of_all = |job, name| select_of(&names, &selector(job, name));
        let found = |name: &str| Ok(Some(name.to_owned()));
        assert_eq!(select_of(&[], &selector(None, None)), Ok(None));
        assert_eq!(
            select_of(&names[..1], &selector(None, None)),
            found(names[0])
        );
        assert_eq!(of_all(Some(62), None), found(names[2]));
        assert_eq!(of_all(None, Some(names[1])), found(names[1]));
        assert_eq!(
            of_all(Some(61), None),
            Err(
                "you have 2 clusters on this host: coracle-61-aaaa, coracle-61-bbbb; \
                 choose one, for example with --name coracle-61-aaaa"
                    .to_owned()
            )
        );
        assert_eq!(of_all(Some(7), None), Ok(None));
    }

    #[test]
    fn selection_is_passed_to_leader_node() {
        let selector = selector(None, Some("coracle-12-ab34"));
        assert_eq!(selector.job(), Some(12));
        assert_eq!(
            selector.remote_args(12).join(" "),
            "--here --job=12 --name=coracle-12-ab34"
        );
    }
}
