//! Drives the real `coracle` on the real Slurm of the lab (lab/README.md), as an ordinary user of it.
//!
//! A test takes the lab with [`Lab::ready`], which waits for its turn and for a clean lab, and ends with
//! [`Lab::nothing_left`]. In between it runs commands on hosts ([`Call`]), keeps some running
//! ([`Running`]), or holds a whole cluster open and talks to a shell in it ([`Cluster`]). Nothing here knows the program's
//! source code: only its command line, its messages and its processes.
//!
//! `CORACLE_LAB_DIR` chooses the lab, as it does for the commands of `lab/`.

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
