//! What the control plane's process and the one that started it tell each other: one line of JSON
//! each, commands on its standard input, events on its standard output.
//!
//! The input doubles as a life line: when it closes, the control plane stops.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The upstream programs, in the order in which they need each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Component {
    /// The store.
    Etcd,
    /// The API server.
    KubeApiserver,
    /// The scheduler.
    KubeScheduler,
    /// The controllers.
    KubeControllerManager,
}

impl Component {
    /// All of them, in the order of starting; stopping is the reverse.
    pub const ALL: [Self; 4] = [
        Self::Etcd,
        Self::KubeApiserver,
        Self::KubeScheduler,
        Self::KubeControllerManager,
    ];

    /// The name of its program.
    pub fn program(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiserver => "kube-apiserver",
            Self::KubeScheduler => "kube-scheduler",
            Self::KubeControllerManager => "kube-controller-manager",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program())
    }
}

/// Everything that the control plane of one cluster is made from.
///
/// It holds private keys: it travels through a pipe, never through a file, argument or environment.
#[derive(Clone, Serialize, Deserialize)]
pub struct ClusterConfig {
    /// The cluster's name, also that of its kubeconfig context.
    pub name: String,
    /// The directory with the upstream programs.
    pub release: PathBuf,
    /// This host's addresses; the first is the one that is advertised.
    pub addresses: Vec<IpAddr>,
    /// The API server's port, reserved by the sender (see [`crate::port`]).
    pub api_port: u16,
    /// The addresses of services.
    pub service_cidr: String,
    /// The addresses of pods.
    pub pod_cidr: String,
    /// The directory of a store to start from; an empty one otherwise.
    pub seed: Option<PathBuf>,
    /// A directory to be kept among the cluster's files, although it is about to be removed.
    pub workload: Option<PathBuf>,
    /// The programs give memory back after they have started, as those that we build do.
    pub tightens_memory: bool,
    /// Where the components' logs go; into memory otherwise.
    pub log_dir: Option<PathBuf>,
    /// Report every line that the components log.
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

/// What the control plane is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Start; the first line, exactly once.
    Start(Box<ClusterConfig>),
    /// Stop the components, but stay until the input ends, so that the store can be copied at rest.
    Rest,
}

/// What the control plane tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The first process is up; `pid` is its id as the outside sees it.
    Up {
        /// The process id under whose `/proc/PID/root` the cluster's files are seen.
        pid: u32,
    },
    /// A program was started.
    Started {
        /// Which one.
        component: Component,
        /// How often it had to be restarted before.
        restarts: u32,
    },
    /// The API server answers requests.
    ApiAnswers,
    /// A program ended by itself; it is started again.
    Exited {
        /// Which one.
        component: Component,
        /// How it ended.
        status: String,
    },
    /// A program can't be kept running; the control plane stops.
    Failed {
        /// Which one.
        component: Component,
        /// What happened.
        reason: String,
        /// The end of its log.
        tail: Vec<String>,
    },
    /// The control plane itself can't be set up.
    Broken {
        /// What happened.
        reason: String,
    },
    /// A line of a program's log, when asked for.
    Log {
        /// Which one.
        component: Component,
        /// The line.
        line: String,
    },
    /// What a program logs can't be written any more; it goes on.
    LogLost {
        /// Which one.
        component: Component,
        /// Why not.
        reason: String,
    },
    /// All components have ended, in order.
    Stopped,
}
