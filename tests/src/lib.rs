//! Runs the real `coracle` on the real Slurm of the lab (lab/README.md), as an ordinary user.
//!
//! A test takes a lab with [`Lab::ready`], which waits for a free one and cleans it, and ends with [`Lab::nothing_left`]. In
//! between it runs commands on hosts ([`Call`]), keeps some running ([`Running`]), or starts a cluster and sends commands to a
//! shell in it ([`Cluster`]). These tests depend only on the program's command line, messages and processes, not on its source
//! code.
//!
//! `CORACLE_LAB_DIR` selects the lab, as for the commands in `lab/`.

mod call;
mod checks;
mod cluster;
mod crafted;
mod disk;
mod goodbye;
mod images;
mod lab;
mod leftovers;
mod output;
mod patience;
mod pods;
mod process;
mod registry;
mod running;
mod signer;
pub mod store;
mod talk;
mod tokens;
mod watched;

pub use call::Call;
pub use checks::{looking, looking_pod, merged, pod};
pub use cluster::Cluster;
pub use crafted::{CAPABLE_LAYER, EMPTY_LAYER};
pub use disk::SmallDisk;
pub use goodbye::said_goodbye;
pub use images::{BUSYBOX, plain, says, waits_with};
pub use lab::{HOSTS, Lab};
pub use output::Output;
pub use patience::{eventually, wait_until};
pub use pods::{condition, container};
pub use process::{Process, Role};
pub use registry::{Form, MIRROR, REGISTRY, Registry};
pub use running::Running;
pub use signer::{Held, KEY_TYPES, NAME as CERTIFICATE_NAME, Signer, refusal};
pub use talk::{WAITS, runs, simple, with_open_input};
pub use tokens::{TOKENS, TokenRegistry};
pub use watched::Watched;
