//! `coracle logs`: shows the logs of a running cluster's components.
//!
//! ```text
//!   log_files.rs prints or follows a component's log files
//!   kubelet.rs   fetches the log of a node's agent through the API server
//! ```

mod kubelet;
mod log_files;

use console::{Failure, FailureCode};
use std::process::ExitCode;

use clap::Args;
use control_plane::ControlPlaneComponent;

use crate::exit;
use crate::running_clusters::{
    ClusterSelector, LocalCluster, StepOutput, find_here, run_on_leader_node,
};
use cluster::carry;

/// The component name, or its prefix in `kubelet/NODE`, that selects agents.
const KUBELET: &str = "kubelet";

/// `coracle logs`
#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub struct LogsArgs {
    /// The component: etcd, kube-apiserver, kube-scheduler, kube-controller-manager, or kubelet/NODE (kubelet for all nodes); without
    /// it, the components are listed
    #[arg(value_name = "COMPONENT")]
    pub component: Option<String>,
    /// Follow the log until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
    /// Print only this many lines from the end
    #[arg(short = 'n', long, value_name = "LINES")]
    pub tail: Option<usize>,
    /// Which cluster.
    #[command(flatten)]
    pub selector: ClusterSelector,
}

const AFTER_HELP: &str = "\
Call it anywhere: inside of the cluster's job, on another terminal, on the login node. Components
of the control plane log into memory on the cluster's first node (each at most 16 MiB, the oldest
goes first), or into the directory that `coracle run --logs DIR` names. Agents of nodes (kubelets)
keep their last megabyte. All of it ends with the cluster; with --logs the files stay.

The logs of pods are not here: see `kubectl logs`.

Examples:
  coracle logs                          the list of components
  coracle logs kube-apiserver           all that the API server logged
  coracle logs -f -n 20 kube-scheduler  its last 20 lines, and what follows
  coracle logs kubelet/node2            the agent of a node
  coracle logs --job 1234 etcd          of the cluster in another job
  coracle logs --name coracle-12-ab34   of one of several clusters in a job";

/// Entry point of the command.
pub fn main(args: LogsArgs) -> anyhow::Result<ExitCode> {
    crate::block_on(run(args))
}

async fn run(args: LogsArgs) -> anyhow::Result<ExitCode> {
    if args.selector.here {
        // The program may be a copy that was carried here.
        carry::remove();
    }
    if let Some(name) = &args.component {
        check_component(name)?;
    }
    let args = LogsArgs {
        selector: args.selector.or_enclosing(),
        ..args
    };
    match find_here(&args.selector)? {
        Some(cluster) => show(&cluster, &args).await,
        None => {
            let (selector, remote_args) = (&args.selector, remote_args(&args));
            let output = StepOutput::Inherited;
            let step = run_on_leader_node(selector, "logs", &remote_args, output).await?;
            Ok(exit::code(step.code))
        }
    }
}

/// The arguments of `coracle logs` on the leader's node, apart from those that select the cluster.
fn remote_args(args: &LogsArgs) -> Vec<String> {
    let mut remote_args = Vec::new();
    if args.follow {
        remote_args.push("--follow".to_owned());
    }
    remote_args.extend(args.tail.map(|tail| format!("--tail={tail}")));
    remote_args.extend(args.component.clone());
    remote_args
}

/// Rejects unknown component names before looking for a cluster.
fn check_component(name: &str) -> Result<(), Failure> {
    let known = ControlPlaneComponent::ALL
        .iter()
        .any(|component| component.program() == name);
    let kubelet = name == KUBELET || name.strip_prefix("kubelet/").is_some_and(is_node_name);
    if known || kubelet {
        return Ok(());
    }
    let names = ControlPlaneComponent::ALL
        .map(ControlPlaneComponent::program)
        .join(", ");
    Err(
        Failure::new(FailureCode::Usage, format!("unknown component {name:?}"))
            .with_hint(format!("components are {names}, kubelet and kubelet/NODE")),
    )
}

/// Whether `name` is a valid Node name. It becomes part of a URL, so other characters are refused.
fn is_node_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    !name.is_empty() && name.chars().all(plain)
}

async fn show(cluster: &LocalCluster, args: &LogsArgs) -> anyhow::Result<ExitCode> {
    match args.component.as_deref() {
        None => log_files::list(cluster)?,
        Some(name) if name == KUBELET || name.starts_with("kubelet/") => {
            let node = name.strip_prefix("kubelet/");
            kubelet::show(cluster, node, args.tail, args.follow).await?;
        }
        Some(name) => log_files::print_component(cluster, name, args.tail, args.follow).await?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_component_names_are_refused() {
        for good in ["etcd", "kube-apiserver", "kubelet", "kubelet/node1.x"] {
            assert!(check_component(good).is_ok(), "{good}");
        }
        for bad in ["", "scheduler", "kubelet/", "kubelet/../etcd", "../etcd"] {
            assert!(check_component(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn options_are_passed_to_leader_node() {
        let args = LogsArgs {
            component: Some("etcd".to_owned()),
            follow: true,
            tail: Some(5),
            selector: ClusterSelector::default(),
        };
        assert_eq!(remote_args(&args).join(" "), "--follow --tail=5 etcd");
    }
}
