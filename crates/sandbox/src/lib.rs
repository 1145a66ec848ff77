//! One pod on one machine, in two parts:
//!
//! - **The pod's lifecycle**, the part of upstream's kubelet that concerns one pod: the order of containers, restarts,
//!   back-off, hooks and statuses ([`lifecycle`]), probes ([`probe`]), storage limits (`eviction.rs`), and the requests of the
//!   kubelet ([`pod`]).
//! - **The container runtime**, the part of a CRI and OCI runtime: the pod sandbox, containers, cgroups and mounts
//!   ([`runtime`]); pid 1 of the pod, which forks containers ([`inner`]); logs ([`logs`]); exec and attach sessions
//!   ([`streams`]); resource usage ([`usage`]).
//!
//! [`container_runtime`] is the interface between them. The pod does not depend on its kubelet: it goes on when the
//! kubelet dies, and reports its complete state to the next one.
//!
//! Deliberately does not know: the API server, nor how images are pulled, volumes filled or addresses assigned. The
//! runtime uses these as [`node_services`], which the binary implements. The kubelet's messages are in [`pod_protocol`].
//!
//! Start reading at [`pod`] and [`container_runtime`], then `lifecycle/plan.rs` and `runtime/mod.rs`.

#![warn(unused_crate_dependencies)]

// The pod's lifecycle.
mod eviction;
pub mod lifecycle;
pub mod pod;
pub mod probe;

// The interfaces below it and below the runtime.
mod container_id;
pub mod container_runtime;
pub mod node_services;

// The container runtime.
pub mod inner;
pub mod logs;
pub mod runtime;
pub mod streams;
pub mod usage;
