//! One pod on one machine: its namespaces, containers, logs, probes and restarts.
//!
//! Responsible for: the life of a pod from the bundle that its kubelet sends ([`protocol`]) to the end of its last
//! container. A sandbox lives on when its kubelet dies, and tells the next one where it stands.
//!
//! Deliberately does not know: the API server, nor how images are pulled, volumes filled or addresses given. Those
//! are asked for through [`seams`], and the binary wires them.
//!
//! Start reading at [`protocol`] and [`seams`].

pub mod checkpoint;
mod id;
pub mod inner;
pub mod life;
pub mod logs;
pub mod probe;
pub mod runtime;
pub mod seams;
pub mod streams;
mod terminal;
pub mod usage;
