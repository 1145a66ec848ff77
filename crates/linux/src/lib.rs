//! Thin, safe, documented wrappers over the Linux features that an unprivileged user can use: namespaces, mounts, process trees,
//! signals, network addresses, and probes that find out which of these features this machine permits.
//!
//! This is the only crate that may contain `unsafe`. It does not depend on Kubernetes, Slurm or Coracle, so any other program
//! could use it.
//!
//! Start reading at [`process`] (how process trees are kept together) and [`namespace`].

#![warn(unused_crate_dependencies)]

pub mod address;
pub mod async_fd;
pub mod cgroup;
pub mod clone;
pub mod container_processes;
pub mod credentials;
pub mod descriptors;
pub mod elf;
pub mod file_id;
pub mod host_resources;
pub mod keyring;
pub mod layer_merge;
pub mod monotonic;
pub mod mount;
pub mod mount_target;
pub mod mount_tree;
pub mod mountinfo;
pub mod namespace;
mod netlink;
pub mod packet;
pub mod packet_connection;
pub mod probe;
pub mod process;
pub mod process_limit;
pub mod remove;
pub mod route;
pub mod sealed;
pub mod seccomp;
pub mod setns;
pub mod signal;
pub mod subpath;
mod syscall;
#[cfg(test)]
mod testing;
pub mod tmpfs;
pub mod usage;
pub mod walk;
