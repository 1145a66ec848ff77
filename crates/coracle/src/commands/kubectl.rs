//! `coracle kubectl`: runs kubectl on a running cluster.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::Args;

use crate::running_clusters::ClusterSelector;
use crate::running_clusters::access::{ClusterAccess, find_kubectl};

/// `coracle kubectl`
#[derive(Debug, Clone, Args)]
#[command(
    override_usage = "coracle kubectl [--job ID] [--name CLUSTER] [KUBECTL ARGS]...",
    after_help = AFTER_HELP
)]
pub struct KubectlArgs {
    /// Which cluster.
    #[command(flatten)]
    pub selector: ClusterSelector,
    /// kubectl's arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub args: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Call it anywhere: on the login node, on another terminal, on a node. The cluster's credentials stay
in memory. Our options come first; all others are kubectl's.

Examples:
  coracle kubectl get pods
  coracle kubectl logs -f job/train
  coracle kubectl --job 1234 exec -it web -- sh";

/// Entry point of the command.
pub fn main(args: KubectlArgs) -> anyhow::Result<ExitCode> {
    let kubectl = find_kubectl()?;
    let access = crate::block_on(ClusterAccess::find(&args.selector.clone().or_enclosing()))?;
    // kubectl keeps this process's id, by which its environment names the kubeconfig.
    let error = Command::new(&kubectl)
        .args(args.args)
        .envs(access.environment(&kubectl)?)
        .exec();
    Err(error).with_context(|| format!("cannot execute {}", kubectl.display()))
}
