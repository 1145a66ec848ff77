//! Runs the real `coracle` on the real Slurm of the lab (lab/README.md), as an ordinary user.
//!
//! A test takes a lab with [`Lab::acquire`], which waits for a free one and cleans it, and ends with [`Lab::assert_nothing_left`]. In
//! between it runs commands on hosts ([`HostCommand`]), keeps some running ([`Running`]), or starts a cluster and sends commands to a
//! shell in it ([`TestCluster`]). These tests depend only on the program's command line, messages and processes, not on its source
//! code.
//!
//! `CORACLE_LAB_DIR` selects the lab, as for the commands in `lab/`.

mod checking_pods;
mod custom_images;
mod graceful_pods;
mod host_command;
mod images;
mod lab;
mod lab_state;
mod output;
mod pod_watch;
mod pods;
mod process;
mod registry;
mod running;
mod signer;
mod small_disk;
pub mod store;
mod streams;
mod test_cluster;
mod token_registry;
mod wait;

pub use checking_pods::{checking_container, checking_pod, merged, pod};
pub use custom_images::{CAPABLE_LAYER, EMPTY_LAYER};
pub use graceful_pods::assert_graceful_termination;
pub use host_command::HostCommand;
pub use images::{BUSYBOX, echo_config, image_pod, wait_for_pull_error};
pub use lab::{HOSTS, Lab};
pub use output::Output;
pub use pod_watch::PodWatch;
pub use pods::{condition, container_status};
pub use process::{Process, Role};
pub use registry::{ImageFormat, MIRROR, REGISTRY, Registry};
pub use running::Running;
pub use signer::{Held, KEY_TYPES, NAME as CERTIFICATE_NAME, Signer, refusal};
pub use small_disk::SmallDisk;
pub use streams::{WAIT_FOR_SIGTERM, script_container, script_pod, with_open_input};
pub use test_cluster::TestCluster;
pub use token_registry::{TOKENS, TokenRegistry};
pub use wait::{eventually, wait_until};
