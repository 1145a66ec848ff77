//! One pod on one machine, in two parts:
//!
//! - `lifecycle/`, the part of upstream's kubelet that concerns one pod: the order of containers, restarts, back-off, hooks,
//!   probes, storage limits and statuses ([`lifecycle`]).
//! - `runtime/`, the part of a CRI and OCI runtime: the pod sandbox, containers, cgroups and mounts ([`runtime`]); pid 1 of
//!   the pod, which forks containers ([`runtime::inner`]); logs ([`runtime::logs`]); exec and attach sessions; resource usage.
//!
//! [`container_runtime`] is the interface between them, and [`pod`] serves the kubelet's requests with both. The pod does not
//! depend on its kubelet: it goes on when the kubelet dies, and reports its complete state to the next one.
//!
//! Deliberately does not know: the API server, nor how images are pulled, volumes filled or addresses assigned. The
//! runtime uses these as [`node_services`], which the binary implements. The kubelet's messages are in [`pod_protocol`].
//!
//! Start reading at [`pod`] and [`container_runtime`], then `lifecycle/plan.rs` and `runtime/mod.rs`.

#![warn(unused_crate_dependencies)]

mod container_id;
pub mod container_runtime;
pub mod lifecycle;
pub mod node_services;
pub mod pod;
pub mod runtime;
