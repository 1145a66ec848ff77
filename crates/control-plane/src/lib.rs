//! Starts, supervises and stops an unmodified upstream control plane as an ordinary user: etcd,
//! kube-apiserver, kube-controller-manager and kube-scheduler, with the certificates, kubeconfigs
//! and the pre-seeded store that they need.
//!
//! This crate deliberately knows nothing of pods, nodes or Slurm, and reads and writes no object of the API
//! server: it reports [`Event`]s, and whoever started it decides.
//!
//! Start reading at [`supervisor::run`]. It runs as the first process of a pid namespace with a
//! memory file system of its own ([`home`]), so `kill -9` of anything leaves neither process nor file.
//! [`components`] holds one file for each upstream program, with its flags as a pure function.

mod api;
pub mod components;
pub mod home;
pub mod kubeconfig;
pub mod log;
mod output;
pub mod pki;
pub mod port;
pub mod protocol;
pub mod seed;
pub mod supervisor;

pub use home::Home;
pub use pki::Pki;
pub use protocol::{ClusterConfig, Command, Component, Event};
