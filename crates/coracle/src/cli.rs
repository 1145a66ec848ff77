//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::engine::ArgValueCompleter;

use crate::commands::completion::CompletionArgs;
use crate::commands::doctor::DoctorArgs;
use crate::commands::image::ImageCommand;
use crate::commands::kubeconfig::KubeconfigArgs;
use crate::commands::kubectl::KubectlArgs;
use crate::commands::kubernetes::KubernetesCommand;
use crate::commands::logs::LogsArgs;
use crate::commands::man::ManArgs;
use crate::commands::shell::ShellArgs;
use crate::completion_values;

/// Real Kubernetes on the Slurm cluster you already have: no root, no administrator.
#[derive(Debug, Parser)]
#[command(name = "coracle", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Default range of pods, in the shared address space of RFC 6598, which HPC sites normally do not use.
pub const DEFAULT_POD_CIDR: &str = "100.64.0.0/11";
/// Default range of Services, in the shared address space of RFC 6598, which HPC sites normally do not use.
pub const DEFAULT_SERVICE_CIDR: &str = "100.96.0.0/16";

/// Registries and full nodes recover within minutes; a wrong name does not, and meanwhile the job's nodes are idle.
const DEFAULT_GIVE_UP_AFTER: &str = "5m";

const AFTER_HELP: &str = "\
Examples:
  coracle doctor                          what this host offers
  srun -N2 coracle run kubectl get nodes  a cluster on two nodes, for one command
  coracle run -N4 -p long app.yaml        a cluster in a new allocation, for manifests
  coracle kubectl get pods                kubectl on your running cluster, from any terminal
  coracle logs kube-apiserver             the log of a component of a running cluster";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a cluster for one workload, and end it with the workload
    Run(RunArgs),
    /// Show what this host, or a node of a partition, offers to Coracle
    Doctor(DoctorArgs),
    /// Install the release of Kubernetes that clusters run
    #[command(subcommand)]
    Kubernetes(KubernetesCommand),
    /// Pull, load, save, list and remove container images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Run kubectl on a running cluster
    Kubectl(KubectlArgs),
    /// Start a shell whose kubectl uses a running cluster
    Shell(ShellArgs),
    /// Print the kubeconfig of a running cluster
    Kubeconfig(KubeconfigArgs),
    /// Show the logs of a running cluster's components
    Logs(LogsArgs),
    /// Print the script for completion in bash, zsh or fish
    Completion(CompletionArgs),
    /// Print a manual page
    Man(ManArgs),
    /// Roles that Coracle starts itself
    #[command(subcommand, hide = true)]
    Internal(InternalCommand),
}

/// The roles that Coracle starts itself; their input comes through pipes.
#[derive(Debug, Subcommand)]
pub enum InternalCommand {
    /// The parent of the upstream control plane components
    ControlPlane,
    /// The agent of one node, which is its kubelet
    Node,
    /// The sandbox of one pod on a machine without an agent
    PodJob,
    /// The hub of a node, which connects its pods to the network
    Hub,
    /// The owner of the namespaces of a node's pods
    HubInside,
    /// Removes a node's directory if all other processes of the node were killed
    Janitor,
    /// The processes of one pod
    Sandbox {
        /// Arguments by which the process is counted as part of its job
        marks: Vec<String>,
    },
    /// Removes a directory that containers have written to
    Remove {
        /// The directory is that of a pod: do not remove it while the pod runs
        #[arg(long)]
        pod: bool,
        /// The directory
        dir: PathBuf,
    },
    /// Removes unpacked layers that no pod uses
    FreeLayers {
        /// The directory of layers
        dir: PathBuf,
        /// Stop when disk usage is at most this percentage
        low: u64,
        /// Remove only layers not used for this many seconds
        age: u64,
    },
    /// Unpacks the archive carried to a leader's node
    Receive {
        /// The directory that receives it
        dir: PathBuf,
    },
    /// Tests one feature of this host
    Probe {
        /// The probe's name
        name: String,
    },
}

/// `coracle run`
#[derive(Debug, Args)]
#[command(
    override_usage = "coracle run [OPTIONS] [SLURM OPTIONS] WORKLOAD [ARGS]...",
    after_help = RUN_HELP
)]
pub struct RunArgs {
    /// Our own options.
    #[command(flatten)]
    pub options: RunOptions,

    /// Slurm's options, the workload and its arguments.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        hide = true,
        add = ArgValueCompleter::new(completion_values::slurm_option_or_path)
    )]
    pub rest: Vec<OsString>,
}

/// The options of `coracle run` that are not Slurm's.
#[derive(Debug, Clone, Default, Args)]
pub struct RunOptions {
    /// Print the logs of the cluster's components
    #[arg(short, long)]
    pub verbose: bool,
    /// Keep the logs of components and, with manifests, of all containers in this directory (DIR/pods/NAMESPACE/POD/CONTAINER.log)
    #[arg(long, value_name = "DIR")]
    pub logs: Option<PathBuf>,
    /// With manifests: do not print the logs of pods
    #[arg(long)]
    pub no_logs: bool,
    /// With manifests: what each line of a log begins with, the names of pod and container or nothing
    #[arg(long, value_name = "PREFIX", value_enum, default_value_t)]
    pub log_prefix: LogPrefix,
    /// With manifests: end the cluster with exit code 77 if a pod cannot run for so long, because its image cannot be pulled, a
    /// ConfigMap or Secret is missing, or no node can take it, and no Job or Pod runs (90s, 5m, 2h; 0 for never)
    #[arg(long, value_name = "DURATION", default_value = DEFAULT_GIVE_UP_AFTER, value_parser = crate::settings::amount::duration)]
    pub give_up_after: Duration,
    /// The release of Kubernetes to use, or a directory of releases [env: CORACLE_KUBERNETES]
    #[arg(long, value_name = "DIR")]
    pub kubernetes: Option<PathBuf>,
    /// Check the request, the manifests (with a temporary API server on this host) and the release, but start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Start the workload before the controllers (of Jobs, Deployments and the like) run, about a second sooner
    #[arg(long)]
    pub early: bool,
    /// Run each pod as a Slurm step with the CPUs, memory and GPUs that it requests (a pod's annotation coracle.dev/launcher,
    /// fork or step, overrides this)
    #[arg(long)]
    pub pods_as_steps: bool,
    /// The API server's port (default: any that is free)
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub api_port: u16,
    /// Time-out for all nodes to become Ready, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub start_timeout: u64,
    /// Addresses of pods
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_POD_CIDR)]
    pub pod_cidr: String,
    /// Addresses of services
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_SERVICE_CIDR)]
    pub service_cidr: String,
    /// Let pods find this directory of the nodes under PATH in hostPath volumes; can be repeated (default: the current
    /// directory as /app, on nodes without an /app of their own)
    #[arg(long, value_name = "PATH=DIR")]
    pub node_path: Vec<String>,
    /// Colour the prefixes of logs: the `coracle run` that submitted this one writes to a terminal
    #[arg(long, hide = true)]
    pub log_colour: bool,
    /// Report to the `coracle run` that submitted this one if the workload exits with 0
    #[arg(long, hide = true)]
    pub report_end: bool,
}

/// The beginning of each line of a pod's log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogPrefix {
    /// POD/CONTAINER
    #[default]
    Pod,
    /// Nothing
    None,
}

impl RunOptions {
    /// The arguments for these options' values about logs of pods.
    pub fn log_args(&self, default: &Self) -> Vec<String> {
        let mut args = Vec::new();
        if self.no_logs {
            args.push("--no-logs".to_owned());
        }
        if self.log_prefix == LogPrefix::None {
            args.push("--log-prefix=none".to_owned());
        }
        if self.log_colour {
            args.push("--log-colour".to_owned());
        }
        if self.give_up_after != default.give_up_after {
            args.push(format!("--give-up-after={}s", self.give_up_after.as_secs()));
        }
        args
    }

    /// Takes over options about logs of pods that stand after Slurm's options and differ from the default.
    pub fn merge_log_options(&mut self, late: &Self, default: &Self) {
        self.no_logs |= late.no_logs;
        self.log_colour |= late.log_colour;
        if late.log_prefix != default.log_prefix {
            self.log_prefix = late.log_prefix;
        }
        if late.give_up_after != default.give_up_after {
            self.give_up_after = late.give_up_after;
        }
    }
}

/// Parses options of `coracle run` that come after Slurm's options.
#[derive(Debug, Parser)]
#[command(name = "coracle run", no_binary_name = true, after_help = RUN_HELP)]
pub struct TrailingOptions {
    /// Our own options.
    #[command(flatten)]
    pub options: RunOptions,
}

const RUN_HELP: &str = "\
WORKLOAD is one of
  a script or program  runs with KUBECONFIG set and kubectl on its PATH; for scripts written for
                       KSI also K8S_CLUSTER_NAME, K8S_CLUSTER_API, K8S_CLUSTER_API_TOKEN, K8S_PORT
  manifests            a .yaml, .yml or .json file, a directory, or - for standard input; coracle
                       applies them, prints the logs of their pods as they come, waits for their
                       Jobs and Pods, and prints a summary

Inside an allocation (srun, sbatch, salloc) the cluster has all of its nodes, and Slurm options
have no effect. Outside, coracle requests an allocation with the given Slurm options, which are
those of srun. The control plane and the workload run on the first node. The cluster ends, and
leaves nothing behind, when the workload ends, at the job's time limit, with scancel or with
Ctrl-C (twice for srun itself, unless it has the option -X). The exit code is the workload's;
failures of Coracle itself have the codes 64 to 77 (docs/exit-codes.md).

The command line, the release of Kubernetes and the manifests (syntax, structure, image names) are
checked before a job is requested. --dry-run also asks Slurm whether it would accept the job, and
applies the manifests to a temporary API server on this host, which has no nodes.

Environment:
  CORACLE_KUBERNETES    as --kubernetes
  CORACLE_ROOTFS        overlay, fuse-overlayfs or copy: the method for root file systems of containers
  CORACLE_IMAGE_GC      high=85,low=80,age=2m,every=5m: removal of unused layers from a node's disk
  CORACLE_IMAGE_LIMITS  bytes=128G,files=8000000: the maximum size of an image
  CORACLE_STREAM_IDLE   4h: the idle time-out of exec, attach and port-forward

Examples:
  srun -N2 coracle run kubectl get nodes
  coracle run -N4 --time=30 -p long job.yaml
  coracle run -N2 ./workload.sh input.dat
  coracle run --dry-run -N2 app.yaml
  helm template chart/ | coracle run -N2 -";
