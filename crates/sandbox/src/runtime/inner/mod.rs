//! The inner process: pid 1 of the pod's pid namespace, parent of its containers.
//!
//! ```text
//!   sandbox ──fork──► inner ──fork──► container ──exec──► the image's program
//!      ▲  requests, events   │  ▲ start reports             │
//!      └─────────────────────┘  └───────────────────────────┘
//! ```
//!
//! It has one thread, so that it may fork. It only serves requests of the sandbox: it starts containers and processes in
//! them, creates sockets in the pod's network namespace, reports exits and reaps orphans. It dies with the sandbox, and
//! the kernel then kills everything in the pod.

mod container;
mod declared_volume;
mod error;
mod main_loop;
pub mod message;
mod program;
mod self_exe;
mod start;
mod terminal;
mod user;

pub use main_loop::run;
