//! Messages between a sandbox and its inner process.
//!
//! Each message is one packet of JSON, with file descriptors attached (`linux::packet`). The sandbox numbers its requests; an
//! event carries the number of its request, the *serial*.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use super::error::{InnerError, InnerErrorKind};

/// A request of the sandbox.
#[derive(Debug, Serialize, Deserialize)]
pub enum InnerRequest {
    /// Creates the pod's namespaces. Sent once, before all others. The reply carries the network namespace.
    CreateNamespaces(NamespacePlan),
    /// Configures the pod's network interface.
    ConfigureInterface(InterfaceConfig),
    /// Starts a container. Descriptors: standard input, output and error, unless it has a terminal.
    StartContainer(Box<ContainerPlan>),
    /// Starts a process in a running container. Descriptors: as for a container.
    Exec {
        /// Serial of the container's start.
        container: u64,
        /// The process.
        process: Box<ProcessPlan>,
    },
    /// Creates a socket in the pod's network namespace. The reply carries it.
    CreateSocket {
        /// Address family.
        ipv6: bool,
        /// UDP rather than TCP.
        udp: bool,
    },
    /// Kills a process that is running or starting, because its client has given up. Has no reply.
    Kill {
        /// Serial of the process's start.
        process: u64,
    },
}

/// A reply to a request, or the later exit of a process that a request started.
#[derive(Debug, Serialize, Deserialize)]
pub enum InnerEvent {
    /// The request succeeded. Descriptors: for an exec the process's pidfd, then its terminal if it has one; else those that
    /// the request names.
    Done,
    /// A container runs. Descriptors: its pidfd, its mount namespace, then its terminal if it has one.
    ContainerStarted(ContainerIdentity),
    /// The request failed.
    Failed(InnerError),
    /// A process that was started has exited.
    Exited(ProcessExit),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Its exit code, or 128 + the signal that killed it.
    pub code: i32,
    /// The signal that killed it.
    pub signal: Option<i32>,
}

impl ProcessExit {
    /// Killed by SIGKILL.
    pub const SIGKILL: Self = Self {
        code: 128 + 9,
        signal: Some(9),
    };
}

/// The user of a container's first process, as seen in the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerIdentity {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// All group ids, the primary one included.
    pub groups: Vec<u32>,
}

/// The namespaces of a pod, and their settings.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct NamespacePlan {
    /// A network namespace of its own.
    pub network: bool,
    /// An IPC namespace of its own.
    pub ipc: bool,
    /// The host name in a UTS namespace of its own; `None` keeps the host's namespace.
    pub hostname: Option<String>,
    /// Sysctls of these namespaces: name, value.
    pub sysctls: Vec<(String, String)>,
}

/// Configuration of the pod's network interface, which exists already.
#[derive(Debug, Serialize, Deserialize)]
pub struct InterfaceConfig {
    /// The interface's name.
    pub interface: String,
    /// Its address.
    pub address: std::net::IpAddr,
    /// The default gateway, which need not be in the address's network.
    pub gateway: std::net::IpAddr,
}

/// A container to run.
#[derive(Debug, Serialize, Deserialize)]
pub struct ContainerPlan {
    /// Its root file system.
    pub root: RootfsPlan,
    /// Its mounts, in order.
    pub mounts: Vec<MountPlan>,
    /// Volumes that the image declares (VOLUME); mounted before `mounts`.
    pub declared_volumes: Vec<DeclaredVolume>,
    /// Symbolic links to create: link, target.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Paths that appear empty.
    pub masked_paths: Vec<PathBuf>,
    /// Paths that are read-only.
    pub readonly_paths: Vec<PathBuf>,
    /// Its pid namespace.
    pub pid_namespace: PidNamespace,
    /// Its first process.
    pub process: ProcessPlan,
}

/// The pid namespace of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PidNamespace {
    /// A new one.
    Own,
    /// That of the inner process: the pod's, or the host's with `hostPID`.
    Inner,
    /// That of another container, by the serial of its start.
    Target(u64),
}

/// A root file system.
#[derive(Debug, Serialize, Deserialize)]
pub struct RootfsPlan {
    /// The image's layers, the lowest first.
    pub layers: Vec<PathBuf>,
    /// The upper directory of overlayfs. `work` and `root` are created beside it.
    pub upper: PathBuf,
    /// How the layers are merged.
    pub kind: RootfsKind,
    /// The container cannot write to it.
    pub read_only: bool,
}

/// How layers are merged into a root file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RootfsKind {
    /// By overlayfs.
    Overlay,
    /// They are already mounted at this path, writable.
    Mounted(PathBuf),
    /// By copying them to `root`, beside the upper directory. The number of copied bytes is written to `copied`, in the same
    /// directory.
    Copy,
}

/// A volume that the image declares; it starts with the image's content of that directory.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct DeclaredVolume {
    /// Its directory on the host.
    pub dir: PathBuf,
    /// Its path in the container.
    pub target: PathBuf,
}

/// One mount.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct MountPlan {
    /// The file or file system to mount.
    pub source: MountSource,
    /// Its path in the container.
    pub target: PathBuf,
    /// Whether it is writable.
    pub access: MountAccess,
    /// Whether later mounts propagate.
    pub propagation: MountPropagation,
}

/// The file or file system to mount.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum MountSource {
    /// A recursive bind mount of a file or directory of the host.
    Bind {
        /// Its path.
        path: PathBuf,
        /// A path below it, resolved without leaving it; created if missing.
        sub_path: Option<PathBuf>,
    },
    /// The layers of an image, read-only.
    Layers {
        /// The lowest first.
        layers: Vec<PathBuf>,
        /// A path below them, resolved without leaving them.
        sub_path: Option<PathBuf>,
    },
    /// A tmpfs with options such as `("mode", "755")`.
    Tmpfs(Vec<(String, String)>),
    /// procfs of the container's pid namespace.
    Proc,
    /// sysfs of the container's network namespace.
    Sys,
    /// cgroup2, with the container's own cgroup as its root.
    Cgroup,
    /// POSIX message queues.
    Mqueue,
    /// devpts.
    Pts,
}

/// Whether a mount is writable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountAccess {
    /// Writable.
    #[default]
    ReadWrite,
    /// Read-only; mounts below it may be writable.
    ReadOnly,
    /// Read-only, and so are all mounts below it.
    RecursiveReadOnly,
}

/// A volume mount's `mountPropagation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountPropagation {
    /// Later mounts stay where they are made.
    #[default]
    None,
    /// Later mounts of the host appear in the container.
    HostToContainer,
    /// Later mounts propagate in both directions.
    Bidirectional,
}

/// A process of a container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProcessPlan {
    /// The program and its arguments.
    pub args: Vec<String>,
    /// Its environment: name, value.
    pub env: Vec<(String, String)>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Its user and groups.
    pub user: UserPlan,
    /// Its capabilities, without `CAP_`.
    pub capabilities: Vec<String>,
    /// Sets `no_new_privs`.
    pub no_new_privileges: bool,
    /// Its system call filter.
    pub seccomp: SeccompProfile,
    /// It has a terminal.
    pub terminal: bool,
    /// `oom_score_adj`
    pub oom_score_adj: i32,
    /// The directory of the container's cgroup, if it has one. The process is created in it.
    pub cgroup: Option<PathBuf>,
}

/// A system call filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeccompProfile {
    /// No filter: the profile `Unconfined`. A container can see that it has none.
    Unconfined,
    /// Denies only the system calls of keyrings.
    #[default]
    DenyKeyrings,
    /// The profile `RuntimeDefault`.
    RuntimeDefault,
}

/// The user and groups of a process. Names are resolved in the container's own files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserPlan {
    /// `runAsUser`
    pub uid: Option<u32>,
    /// `runAsGroup`
    pub gid: Option<u32>,
    /// USER of the image; used if `uid` is not set.
    pub image_user: String,
    /// Supplemental groups.
    pub supplemental_groups: Vec<u32>,
    /// `supplementalGroupsPolicy: Strict`: groups of the container's `/etc/group` are not added.
    pub strict_groups: bool,
    /// The user namespace maps a single id, so a system call filter pretends that changes of ids succeed.
    pub single_id: bool,
}
