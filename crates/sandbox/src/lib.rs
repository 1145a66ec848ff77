//! One pod on one machine, in two parts:
//!
//! - [`lifecycle`], the pod life cycle: order of containers, restarts, back-off, hooks, probes, status. It is the pod's part of
//!   upstream's kubelet.
//! - [`runtime`], the container runtime: namespaces, mounts, cgroups, processes, logs. It is what CRI and OCI runtimes do elsewhere.
//!
//! [`container_runtime`] is the interface between the two. A sandbox continues without its kubelet, and sends its complete
//! state to the next one.
//!
//! Deliberately does not know: the API server, nor how images are pulled, volumes filled or addresses assigned. Those
//! are [`node_services`], which the binary implements. The messages of the kubelet are those of [`pod_protocol`].
//!
//! Start reading at [`container_runtime`], then `lifecycle/plan.rs`.

mod container_id;
pub mod container_runtime;
pub mod inner;
pub mod lifecycle;
pub mod logs;
pub mod node_services;
pub mod probe;
pub mod runtime;
pub mod streams;
mod terminal;
pub mod usage;
