//! The network of the cluster. So far one part of it: the way in, by which the API server reaches
//! kubelets ([`egress`]). Hubs, services and names follow; see docs/architecture.md.
//!
//! This crate knows nothing of the kubelet, of Slurm or of the API server's objects: it moves bytes.

pub mod egress;
