//! Volumes: from what the API says to directories that can be mounted, and the storage provisioner.
//!
//! Responsible for: what the files of a configMap, secret, downwardAPI or projected volume are ([`content`], pure
//! functions), and for directories on the node that hold them and other sources ([`dirs`]); for making and removing the
//! directories behind persistent volumes ([`provisioner`]).
//!
//! Deliberately does not know: containers, images (an image volume is only named here), nor who mounts what where.
//! [`content`] runs where the API server can be asked; [`dirs`] runs on the node, as the root of its user namespace. A
//! [`Source`] is what travels from the one to the other.
//!
//! Start reading at [`Source`], then [`dirs::Volumes`].

pub mod content;
pub mod dirs;
pub mod provisioner;
mod source;

pub use content::{FileContent, Payload};
pub use dirs::{Prepared, VolumeError, Volumes};
pub use source::{HostPathKind, Ownership, Source};

/// The annotation of a PersistentVolume of type nfs that says where nodes have mounted it.
pub const MOUNTED_AT: &str = "coracle.dev/mounted-at";
