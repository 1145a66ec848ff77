//! Volumes of pods, and the storage provisioner.
//!
//! Responsible for the files of configMap, secret, downwardAPI and projected volumes ([`content`], pure functions), for
//! the directories on the node that hold these and other volumes ([`dirs`]), and for creating and removing the
//! directories of persistent volumes ([`provisioner`]).
//!
//! This crate deliberately knows nothing of containers and their mounts, or of images: an image volume is only a name here.
//! [`content`] runs in the kubelet, which has access to the API server. [`dirs`] runs in the pod's sandbox, as root of its user
//! namespace. The kubelet sends a [`VolumeSource`] to the sandbox.
//!
//! Start reading at [`VolumeSource`], then [`dirs::PodVolumes`].

// Some development dependencies are used only by the tests in `tests/`.
#![cfg_attr(not(test), warn(unused_crate_dependencies))]

pub mod content;
pub mod dirs;
mod node_path;
pub mod provisioner;
mod source;

pub use content::{FileContent, Payload};
pub use dirs::{PodVolumes, PreparedVolume, VolumeError};
pub use node_path::{MappedPath, NodePath};
pub use source::{FsGroupPolicy, HostPathKind, VolumeSource};

/// Annotation of a PersistentVolume of type nfs: the path where nodes have mounted it.
pub const MOUNTED_AT_ANNOTATION: &str = "coracle.dev/mounted-at";
