//! The source of a volume, with all references to API objects resolved.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{MappedPath, Payload};

/// A volume's source, as the kubelet sends it to the pod's sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum VolumeSource {
    /// A new directory with the lifetime of the pod.
    EmptyDir {
        /// On a tmpfs instead of the node's disk.
        memory: bool,
        /// In bytes. The kernel enforces it on a tmpfs; on disk the sandbox polls
        /// [`PodVolumes::usage`](crate::PodVolumes::usage) and evicts the pod.
        size_limit: Option<u64>,
    },
    /// Files of a configMap, secret, downwardAPI or projected volume.
    Files(Payload),
    /// An existing path of the node.
    HostPath {
        /// The path on the node.
        path: PathBuf,
        /// The required file type.
        kind: HostPathKind,
        /// From the claim of a persistent volume.
        #[serde(default)]
        read_only: bool,
        /// Another path to mount instead.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mapped: Option<MappedPath>,
    },
    /// A directory of an NFS server that this node has mounted already. Mounting NFS needs root.
    Nfs {
        /// The server, as in the node's mount table.
        server: String,
        /// The directory on the server.
        path: String,
        /// The mount point, if the PersistentVolume's annotation names it; otherwise found in the node's mount table.
        mounted_at: Option<PathBuf>,
        /// From the volume or its claim.
        read_only: bool,
    },
    /// The content of an image. The sandbox pulls it as the pod's spec says; this crate does not prepare it.
    Image {
        /// The image's name in the pod's spec.
        reference: String,
    },
    /// A persistent volume that is a directory on this node.
    Directory {
        /// The path on the node.
        path: PathBuf,
        /// From the volume or its claim.
        read_only: bool,
        /// How the pod's fsGroup is applied.
        ownership: FsGroupPolicy,
        /// Create the directory at the first mount, because the provisioner cannot reach this node's disk.
        #[serde(default)]
        create: bool,
    },
}

/// The API's `hostPath.type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostPathKind {
    /// No check; a missing directory is created, as container runtimes do.
    #[default]
    Unchecked,
    /// A directory, created if missing.
    DirectoryOrCreate,
    /// A directory.
    Directory,
    /// A file, created if missing.
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
    /// Parses the API's `hostPath.type`; `None` for an unknown type.
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
pub enum FsGroupPolicy {
    /// Not at all, as upstream does for hostPath and nfs.
    #[default]
    Keep,
    /// To all files.
    Always,
    /// To all files, unless the volume's root has the right group and mode already.
    OnRootMismatch,
}
