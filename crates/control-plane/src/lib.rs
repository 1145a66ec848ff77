//! Starts, supervises and stops an unmodified upstream control plane as an ordinary user: etcd,
//! kube-apiserver, kube-controller-manager and kube-scheduler, with the certificates, kubeconfigs
//! and the pre-seeded store that they need.
//!
//! This crate deliberately knows nothing of pods, nodes or Slurm, and reads and writes no object of the API
//! server. It reports [`ControlPlaneEvent`]s, and its parent process decides.
//!
//! Start reading at [`supervisor::run`]. It runs as the first process of a pid namespace with a private
//! tmpfs ([`dir`]), so `kill -9` of any process leaves neither processes nor files, but for storage and keys that the
//! caller puts on disk ([`ClusterStorage`], [`ClusterKeys`]).
//! [`components`] has one file per upstream program, with its flags as a pure function.

#![warn(unused_crate_dependencies)]

mod api_probe;
pub mod components;
pub mod dir;
pub mod key_dir;
pub mod kubeconfig;
pub mod log;
mod output;
pub mod pki;
pub mod port;
mod private_file;
pub mod protocol;
pub mod seed;
mod storage;
pub mod supervisor;

pub use dir::ControlPlaneDir;
pub use key_dir::{ClusterKeys, KeysError};
pub use pki::ClusterPki;
pub use protocol::{ClusterConfig, ControlPlaneCommand, ControlPlaneComponent, ControlPlaneEvent};
pub use storage::ClusterStorage;
