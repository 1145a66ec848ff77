//! The network of the cluster: the [`hub`] of a node, at which its pods meet, and the way in, by which the API server
//! reaches kubelets ([`egress`]). Links between nodes, services and names follow; see docs/architecture.md.
//!
//! This crate knows nothing of the kubelet, of Slurm or of the API server's objects: it moves bytes.

pub mod egress;
pub mod hub;
