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

pub use self::local::LocalCluster;
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
    /// The job of the cluster, if it is known.
    fn job(&self) -> Option<u32> {
        let of_name = || self.name.as_deref().and_then(local::job_of);
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

/// The selected cluster if its leader runs on this host; `None` if other hosts have to be searched.
pub fn find_here(selector: &ClusterSelector) -> Result<Option<LocalCluster>, Failure> {
    // The command may be called in the workload of a cluster.
    let enclosing = std::env::var(NAME_VARIABLE).ok();
    match select(local::find(), selector, enclosing.as_deref())? {
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
    enclosing: Option<&str>,
) -> Result<Option<LocalCluster>, Failure> {
    clusters.retain(|cluster| {
        (selector.job.is_none() || cluster.job == selector.job)
            && selector
                .name
                .as_ref()
                .is_none_or(|name| cluster.name == *name)
    });
    let is_enclosing = |cluster: &LocalCluster| Some(cluster.name.as_str()) == enclosing;
    if clusters.len() > 1 && clusters.iter().any(is_enclosing) {
        clusters.retain(is_enclosing);
    }
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

    fn select_of(
        names: &[&str],
        selector: &ClusterSelector,
        enclosing: Option<&str>,
    ) -> Result<Option<String>, String> {
        let clusters = names.iter().map(|name| LocalCluster::named(name));
        let selected = select(clusters.collect(), selector, enclosing);
        selected
            .map(|cluster| cluster.map(|cluster| cluster.name))
            .map_err(|failure| format!("{failure}; {}", failure.hint().unwrap_or_default()))
    }

    #[test]
    fn clusters_of_one_job_are_selected_by_name() {
        let names = ["coracle-61-aaaa", "coracle-61-bbbb", "coracle-62-cccc"];
        let found = |text: &str| Ok(Some(text.to_owned()));
        let none = selector(None, None);
        assert_eq!(select_of(&[], &none, None), Ok(None));
        assert_eq!(select_of(&names[..1], &none, None), found(names[0]));
        assert_eq!(
            select_of(&names, &selector(Some(62), None), None),
            found(names[2])
        );
        assert_eq!(
            select_of(&names, &selector(None, Some(names[1])), None),
            found(names[1])
        );
        assert_eq!(
            select_of(&names, &selector(Some(61), None), None),
            Err(
                "you have 2 clusters on this host: coracle-61-aaaa, coracle-61-bbbb; \
                 choose one, for example with --name coracle-61-aaaa"
                    .to_owned()
            )
        );
        assert_eq!(select_of(&names, &selector(Some(7), None), None), Ok(None));
    }

    #[test]
    fn enclosing_cluster_is_the_default() {
        let names = ["coracle-61-aaaa", "coracle-61-bbbb"];
        let inside = |selector: &ClusterSelector| select_of(&names, selector, Some(names[1]));
        let second = Ok(Some(names[1].to_owned()));
        assert_eq!(inside(&selector(None, None)), second);
        assert_eq!(inside(&selector(Some(61), None)), second);
        let first = inside(&selector(None, Some(names[0])));
        assert_eq!(first, Ok(Some(names[0].to_owned())));
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
