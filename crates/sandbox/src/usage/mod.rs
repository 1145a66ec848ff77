//! What a pod uses: processors, memory, disk, network.
//!
//! Figures come from the containers' control groups where they have any, and from `/proc` of their processes otherwise
//! (`processes.rs`). What is on disk is found by walking directories, seldom and in the background (`disk.rs`).
//! Everything is measured here, in the sandbox, because only it is sure to be on the pod's machine.

mod disk;
mod measure;
mod processes;

pub use self::disk::Disk;
pub use self::measure::{Meter, Subject, VolumeSubject};
