//! `metrics.k8s.io`: the resource usage of nodes and pods, for `kubectl top` and HorizontalPodAutoscalers.
//!
//! This is an aggregated API, served by the cluster's leader. Upstream's metrics-server would do the same as a pod, but needs an
//! image, a node to run on and half a minute before it has data. This one reads `/stats/summary` of the kubelets only when a request
//! arrives, and is idle otherwise.
//!
//! Responsible for: the resources `nodes` and `pods` of the group, their discovery, and CPU rates from counters.
//!
//! Deliberately does not know: how usage is measured, authorization (the API server checks it before it forwards a request, and the
//! listener admits no other client), nor how the API server finds this listener.
//!
//! Start reading at [`serve`], then `usage_cache.rs` (when kubelets are queried) and `rates.rs` (pure).

#![warn(unused_crate_dependencies)]

mod cluster_source;
mod discovery;
mod handlers;
mod rates;
mod server;
mod usage_cache;

pub use cluster_source::Kubelets;
pub use server::{MetricsServeError, MetricsServerIdentity, serve};

/// The API group.
pub const GROUP: &str = "metrics.k8s.io";
/// The only version of the group.
pub const VERSION: &str = "v1beta1";
