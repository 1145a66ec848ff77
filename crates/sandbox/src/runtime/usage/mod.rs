//! Measures a pod's resource usage: CPU, memory, disk, network.
//!
//! The figures come from the containers' cgroups if they have any, else from `/proc` of their processes (`processes.rs`). Disk usage is
//! found by walking directories, rarely and in the background (`disk.rs`). `pod.rs` selects the containers and volumes. The
//! sandbox measures, because only it is certain to be on the pod's machine.

mod disk;
mod measure;
mod pod;
mod processes;

pub use self::measure::{MeasuredContainer, MeasuredVolume, UsageMeter};
