//! Thin, safe, documented wrappers over what Linux offers an ordinary user: namespaces, mounts,
//! processes that die together, signals, network addresses, and probes that find out which of these
//! this machine grants.
//!
//! This is the only crate that may hold `unsafe`. It knows nothing of Kubernetes, Slurm or Coracle:
//! everything here could be used by any other program.
//!
//! Start reading at [`process`] (how process trees are kept together) and [`namespace`].

pub mod address;
pub mod cgroup;
pub mod credentials;
pub mod descriptors;
pub mod elf;
pub mod file_id;
pub mod fresh;
pub mod keyring;
pub mod kin;
pub mod mount;
pub mod mounted;
pub mod namespace;
mod netlink;
pub mod packet;
pub mod place;
pub mod probe;
pub mod process;
pub mod process_limit;
pub mod remove;
pub mod route;
pub mod sealed;
pub mod seccomp;
pub mod signal;
pub mod stack;
pub mod subpath;
#[cfg(test)]
mod testing;
pub mod tmpfs;
pub mod tree;
pub mod usage;
pub mod walk;
