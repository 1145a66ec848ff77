//! The protocol between the control plane's process and its parent: lines of JSON, commands on standard input, events on
//! standard output.
//!
//! The control plane stops when its standard input is closed.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::storage::ClusterStorage;

/// The upstream programs, in the order of their dependencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlPlaneComponent {
    /// etcd.
    Etcd,
    /// The API server.
    KubeApiserver,
    /// The scheduler.
    KubeScheduler,
    /// The controller manager.
    KubeControllerManager,
}

impl ControlPlaneComponent {
    /// All components in start order; stop order is the reverse.
    pub const ALL: [Self; 4] = [
        Self::Etcd,
        Self::KubeApiserver,
        Self::KubeScheduler,
        Self::KubeControllerManager,
    ];

    /// The program's name.
    pub fn program(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiserver => "kube-apiserver",
            Self::KubeScheduler => "kube-scheduler",
            Self::KubeControllerManager => "kube-controller-manager",
        }
    }
}

impl fmt::Display for ControlPlaneComponent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program())
    }
}

/// The configuration of one cluster's control plane.
///
/// It contains private keys, so it is sent through a pipe, never in a file, an argument or the environment.
#[derive(Clone, Serialize, Deserialize)]
pub struct ClusterConfig {
    /// The cluster's name, also that of its kubeconfig context.
    pub name: String,
    /// The directory with the upstream programs.
    pub release: PathBuf,
    /// This host's addresses; the first one is advertised.
    pub addresses: Vec<IpAddr>,
    /// The API server's port, reserved by the parent (see [`crate::port`]).
    pub api_port: u16,
    /// The address range of services.
    pub service_cidr: String,
    /// The address range of pods.
    pub pod_cidr: String,
    /// Where etcd keeps the objects.
    pub storage: ClusterStorage,
    /// The seed: an etcd data directory to start from. Without it an empty store stays empty.
    pub seed: Option<PathBuf>,
    /// A directory to bind into the control plane's directory, because the parent removes it soon.
    pub workload: Option<PathBuf>,
    /// Whether the programs lower GOGC after their start, as our own build does (kubernetes/main.go).
    pub lowers_gogc: bool,
    /// The directory for the components' logs; in memory if unset.
    pub log_dir: Option<PathBuf>,
    /// Report each line of the components' logs.
    pub verbose: bool,
    /// Certificates, keys and tokens by file name.
    pub files: BTreeMap<String, String>,
    /// The kubeconfig of the cluster's administrator.
    pub admin_kubeconfig: String,
}

impl fmt::Debug for ClusterConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterConfig")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A command to the control plane.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlPlaneCommand {
    /// Start. The first line, exactly once.
    Start(Box<ClusterConfig>),
    /// Stop the components, but keep the process until standard input is closed, so that etcd's data can be copied.
    StopComponents,
}

/// An event of the control plane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlPlaneEvent {
    /// Pid 1 of the control plane runs.
    Up {
        /// Its pid in the parent's pid namespace; `/proc/PID/root` has the cluster's files.
        pid: u32,
    },
    /// A program was started.
    Started {
        /// The component.
        component: ControlPlaneComponent,
        /// The number of earlier restarts.
        restarts: u32,
    },
    /// The API server answers requests.
    ApiServerResponds,
    /// A program exited and will be restarted.
    Exited {
        /// The component.
        component: ControlPlaneComponent,
        /// The exit status.
        status: String,
    },
    /// A program keeps failing; the control plane stops.
    Failed {
        /// The component.
        component: ControlPlaneComponent,
        /// The reason.
        reason: String,
        /// The last lines of its log.
        tail: Vec<String>,
    },
    /// The control plane cannot be set up.
    SetupFailed {
        /// The reason.
        reason: String,
    },
    /// A line of a program's log, if `verbose` is set.
    Log {
        /// The component.
        component: ControlPlaneComponent,
        /// The line.
        line: String,
    },
    /// A program's log cannot be written; the program keeps running.
    LogWriteFailed {
        /// The component.
        component: ControlPlaneComponent,
        /// The error.
        reason: String,
    },
    /// All components have stopped.
    Stopped,
}
