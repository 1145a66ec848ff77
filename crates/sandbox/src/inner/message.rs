//! What a sandbox and its inner process tell each other. Each message is one packet; what belongs to it as a descriptor
//! travels beside it (`linux::packet`). Requests are numbered, and answers and news have the number of their request.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What the inner process is asked to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Make the namespaces that the pod has for itself. First of all, once. Answered by a file that stands for the network.
    SetUp(PodSetUp),
    /// Give the pod's interface its address.
    Network(NetworkSetUp),
    /// Start a container. Descriptors: standard input, output and error, unless it has a terminal.
    Start(Box<ContainerPlan>),
    /// Start a process in a running container. Descriptors: as for a container.
    Exec {
        /// The serial of the container's start.
        container: u64,
        /// The process.
        process: Box<ProcessPlan>,
    },
    /// Make a socket of the pod's network.
    Socket {
        /// For IPv6.
        v6: bool,
        /// For UDP rather than TCP.
        datagrams: bool,
    },
    /// Kill a process that was started, or is starting, because nobody waits for it any more. Not answered.
    Kill {
        /// The serial of its start.
        process: u64,
    },
}

/// What happened.
#[derive(Debug, Serialize, Deserialize)]
pub enum News {
    /// It is done. Descriptors: of a start, the process, and its terminal if it has one; of a socket, the socket.
    Done,
    /// A container runs. Descriptors: the process, its mount namespace, and its terminal if it has one.
    Runs(Identity),
    /// It could not be done.
    Failed {
        /// Why, for people.
        message: String,
        /// The program to run is missing or can't be run, rather than anything of ours.
        program: bool,
    },
    /// A process that was started has ended.
    Exited {
        /// As a shell would say it.
        code: i32,
        /// The signal that killed it.
        signal: Option<i32>,
    },
}

/// Who a container's first process is, as the container itself sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// All its groups.
    pub groups: Vec<u32>,
}

/// The namespaces of a pod, and what is set in them.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PodSetUp {
    /// A network of its own.
    pub network: bool,
    /// Inter-process communication of its own.
    pub ipc: bool,
    /// The host name; `None` keeps the host's.
    pub hostname: Option<String>,
    /// Kernel parameters of these namespaces.
    pub sysctls: Vec<(String, String)>,
}

/// The pod's place in the network.
#[derive(Debug, Serialize, Deserialize)]
pub struct NetworkSetUp {
    /// The interface, which is there already.
    pub interface: String,
    /// Its address.
    pub address: std::net::IpAddr,
    /// How many bits of it name the network.
    pub prefix: u8,
    /// Where everything else goes.
    pub gateway: std::net::IpAddr,
}

/// All that it takes to run a container.
#[derive(Debug, Serialize, Deserialize)]
pub struct ContainerPlan {
    /// Its root file system.
    pub root: RootPlan,
    /// Its mounts, in order.
    pub mounts: Vec<MountPlan>,
    /// Before them, what the image declares as volumes.
    pub image_volumes: Vec<ImageVolume>,
    /// Symbolic links to make: from, to.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Paths that show nothing.
    pub masked: Vec<PathBuf>,
    /// Paths that can't be written.
    pub read_only_paths: Vec<PathBuf>,
    /// In which process namespace it runs.
    pub processes: Processes,
    /// Its first process.
    pub process: ProcessPlan,
}

/// In which process namespace a container runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Processes {
    /// Its own.
    Own,
    /// That of the inner process: the pod's, or the host's.
    Inner,
    /// That of another container, by the serial of its start.
    Of(u64),
}

/// A root file system: layers, and a place for changes.
#[derive(Debug, Serialize, Deserialize)]
pub struct RootPlan {
    /// The lowest first.
    pub layers: Vec<PathBuf>,
    /// Where changes go. Beside it, `work` and `root` are made.
    pub upper: PathBuf,
    /// How the layers become one.
    pub kind: RootKind,
    /// Nobody may write.
    pub read_only: bool,
}

/// How layers become one file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RootKind {
    /// By overlayfs.
    Overlay,
    /// Somebody shows them, with changes, there.
    At(PathBuf),
    /// They are copied to `root`, beside the place for changes. How many bytes that took is written to `copied`, there too.
    Copy,
}

/// A directory that the image declares as a volume; it begins with what the image has there.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// Where it is kept.
    pub dir: PathBuf,
    /// Where in the container.
    pub target: PathBuf,
}

/// One mount.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct MountPlan {
    /// What.
    pub source: MountSource,
    /// Where in the container.
    pub target: PathBuf,
    /// Whether it can be written.
    pub access: Access,
    /// Mounts that are made later come in, or go out too.
    pub propagation: Propagation,
}

/// What is mounted.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum MountSource {
    /// A file or directory of the outside, with what is mounted below it.
    Bind {
        /// Where it is.
        path: PathBuf,
        /// What below it, found without following links out of it; made if missing.
        sub_path: Option<PathBuf>,
    },
    /// Layers of an image, to be read.
    Layers {
        /// The lowest first.
        layers: Vec<PathBuf>,
        /// What of them, found without following links out of them.
        sub_path: Option<PathBuf>,
    },
    /// Memory, with options such as `("mode", "755")`.
    Tmpfs(Vec<(String, String)>),
    /// The container's processes.
    Proc,
    /// The kernel's devices, as its network namespace sees them.
    Sys,
    /// Control groups, of which the container's own is the root.
    Cgroup,
    /// Message queues.
    Mqueue,
    /// Terminals.
    Pts,
}

/// Whether a mount can be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// Yes.
    #[default]
    Write,
    /// No; what is mounted below it may be.
    Read,
    /// No, and nothing below.
    ReadAll,
}

/// How mounts travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    /// Not at all.
    #[default]
    None,
    /// In.
    HostToContainer,
    /// In and out.
    Bidirectional,
}

/// A process of a container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProcessPlan {
    /// The program and its arguments.
    pub args: Vec<String>,
    /// Its environment, `NAME`, value.
    pub env: Vec<(String, String)>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Who it is.
    pub user: UserPlan,
    /// What root may do in it.
    pub capabilities: Vec<String>,
    /// Programs give it no more rights.
    pub no_new_privileges: bool,
    /// Which system calls it may make.
    pub seccomp: Seccomp,
    /// It has a terminal.
    pub terminal: bool,
    /// How gladly the kernel kills it when memory is short.
    pub oom_score_adj: i32,
    /// The directory of the control group that it is born into, if its container has one.
    pub group: Option<PathBuf>,
}

/// A filter of system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seccomp {
    /// None: the profile `Unconfined`, which can be seen from inside.
    None,
    /// All but those of keyrings.
    #[default]
    Keyless,
    /// The profile `RuntimeDefault`.
    RuntimeDefault,
}

/// Who a process is. Names are looked up in the container's own files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserPlan {
    /// `runAsUser`
    pub uid: Option<u32>,
    /// `runAsGroup`
    pub gid: Option<u32>,
    /// USER of the image, if `uid` is not given.
    pub name: String,
    /// Groups beside.
    pub groups: Vec<u32>,
    /// Only these, and not those of the container's files.
    pub groups_strict: bool,
    /// There is one id only, so that changing it is pretended.
    pub one_id: bool,
}
