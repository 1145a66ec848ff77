//! `metrics.k8s.io`: what nodes and pods use, for `kubectl top` and HorizontalPodAutoscalers.
//!
//! An aggregated API of our own, served by the cluster's leader. Upstream's metrics-server would do the same as a pod, but needs an
//! image, a node to run on and half a minute before it has anything to tell. This one asks the kubelets for `/stats/summary` when
//! somebody asks it, and is idle otherwise.
//!
//! Responsible for: the resources `nodes` and `pods` of the group, their discovery, and rates from counters.
//!
//! Deliberately does not know: how anything is measured, who may ask (the API server has decided that before it passes a request on, and
//! nobody else gets in), nor how the API server finds it.
//!
//! Start reading at [`serve`], then `usage.rs` (when kubelets are asked) and `rates.rs` (pure).

mod answers;
mod discovery;
mod kubelets;
mod rates;
mod server;
mod usage;

pub use kubelets::Kubelets;
pub use server::{Identity, ServeError, serve};

/// The group.
pub const GROUP: &str = "metrics.k8s.io";
/// Its one version.
pub const VERSION: &str = "v1beta1";
