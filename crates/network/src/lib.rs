//! The cluster's network: the [`hub`] of a node, which connects its pods, and the [`egress`] proxy, through which the API
//! server reaches kubelets. Links between nodes, services and DNS are not implemented yet; see docs/architecture.md.
//!
//! This crate knows nothing of the kubelet, Slurm or objects of the API server. Start reading at [`hub`].

#![warn(unused_crate_dependencies)]

pub mod egress;
pub mod hub;
