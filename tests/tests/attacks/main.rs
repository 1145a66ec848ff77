//! Attacks on a user's cluster: by another user of the same hosts, by images, by pods.

mod carried_program;
mod enumeration;
mod host_processes;
mod images;
mod keyrings;
mod mounts;
mod node_proxy;
mod own_program;
mod second_user;
