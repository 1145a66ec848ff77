//! What a volume is made of, once the API has been asked everything.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Payload;

/// A volume's source, as the kubelet sends it to the sandbox of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Source {
    /// A new directory that lives as long as the pod.
    EmptyDir {
        /// In memory rather than on the node's disk.
        memory: bool,
        /// In bytes. In memory the kernel holds it; on disk the owner of the pod asks for
        /// [`Volumes::usage`](crate::Volumes::usage) and evicts.
        size_limit: Option<u64>,
    },
    /// Files whose content is known: configMap, secret, downwardAPI, projected.
    Files(Payload),
    /// A path of the node as it is.
    HostPath {
        /// Where.
        path: PathBuf,
        /// What must be there.
        kind: HostPathKind,
        /// The claim of a persistent volume says so.
        #[serde(default)]
        read_only: bool,
    },
    /// A directory of an NFS server that this node has mounted already: mounting is the administrator's.
    Nfs {
        /// The server, as the mount names it.
        server: String,
        /// The directory there.
        path: String,
        /// Where it is mounted, if the user says so; else it is looked for among the node's mounts.
        mounted_at: Option<PathBuf>,
        /// The volume or its claim says so.
        read_only: bool,
    },
    /// The content of an image; whoever owns images makes the directory.
    Image {
        /// As the pod names it.
        reference: String,
        /// `Always`, `IfNotPresent` or `Never`.
        pull_policy: String,
    },
    /// A persistent volume that is a directory on this node.
    Directory {
        /// Where.
        path: PathBuf,
        /// The claim or the volume itself says so.
        read_only: bool,
        /// Whether the pod's fsGroup is applied.
        ownership: Ownership,
        /// Made when first mounted: the provisioner can't reach this node's disk.
        #[serde(default)]
        create: bool,
    },
}

/// What must be at a hostPath.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostPathKind {
    /// Anything; a directory is made if there is nothing, as container runtimes do.
    #[default]
    Unchecked,
    /// A directory, made if missing.
    DirectoryOrCreate,
    /// A directory.
    Directory,
    /// A file, made if missing.
    FileOrCreate,
    /// A file.
    File,
    /// A Unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl HostPathKind {
    /// From the API's `hostPath.type`; `None` if there is no such type.
    pub fn from_api(name: &str) -> Option<Self> {
        Some(match name {
            "" => Self::Unchecked,
            "DirectoryOrCreate" => Self::DirectoryOrCreate,
            "Directory" => Self::Directory,
            "FileOrCreate" => Self::FileOrCreate,
            "File" => Self::File,
            "Socket" => Self::Socket,
            "CharDevice" => Self::CharDevice,
            "BlockDevice" => Self::BlockDevice,
            _ => return None,
        })
    }
}

/// How the pod's fsGroup is applied to a persistent volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ownership {
    /// Not at all: hostPath and nfs, as upstream.
    #[default]
    Keep,
    /// To every file.
    Always,
    /// To every file, unless the volume's root has it already.
    OnRootMismatch,
}
