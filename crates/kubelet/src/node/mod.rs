//! This machine as a Node of the cluster.
//!
//! ```text
//!   object.rs              the Node object: capacity, labels, system info          pure
//!   conditions.rs          its conditions                                          pure
//!   pressure.rs            whether memory, disk or process ids are short
//!   system_info.rs         kernel, distribution, machine id
//!   register.rs            creates the Node, or adopts an existing one
//!   status.rs              keeps its conditions and allocatable resources current
//!   extended_resources.rs  resources that other programs added to its capacity     pure
//!   images.rs              keeps its list of images current
//!   lease.rs               renews its lease (the heartbeat)
//!   deregister.rs          deletes Node and lease when the kubelet ends
//! ```

mod conditions;
pub(crate) mod deregister;
mod extended_resources;
pub(crate) mod images;
pub(crate) mod lease;
mod object;
pub(crate) mod pressure;
pub(crate) mod register;
pub(crate) mod status;
mod system_info;

pub use object::node_object;
pub(crate) use object::resources;
#[cfg(test)]
pub(crate) use object::tests;
pub use pressure::Pressures;
pub use system_info::SystemInfo;
