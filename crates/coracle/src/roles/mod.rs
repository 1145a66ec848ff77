//! Roles of processes that Coracle starts itself: `coracle internal ROLE` calls `main` in module `ROLE`. A role that lasts as long
//! as a cluster, a node or a pod is named by a noun; a role that does one task and exits is named by a verb.
//!
//! A role's module also has the items that other processes use to start it: the type of its configuration, or a function
//! `start_process` (which returns when the process runs) or `run_process` (which returns when it has exited). Roles use no other
//! items of each other; modules beside this one have the code that roles share.

pub mod control_plane;
pub mod free_layers;
pub mod hub;
pub mod hub_inside;
pub mod janitor;
pub mod node;
pub mod pod_job;
pub mod probe;
pub mod receive;
pub mod remove;
pub mod sandbox;
