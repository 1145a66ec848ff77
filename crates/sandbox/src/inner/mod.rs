//! The inner process: first of the pod's process namespace, parent of its containers.
//!
//! ```text
//!   sandbox ──fork──► inner ──fork──► container ──exec──► the image's program
//!      ▲  requests, answers  │  ▲ why it could not start    │
//!      └─────────────────────┘  └───────────────────────────┘
//! ```
//!
//! It has one thread, so that it may fork, and does nothing but what it is asked to: start containers and processes in
//! them, make sockets in the pod's network, tell of ends, and reap what others left. When it dies, and it dies with the
//! sandbox, the kernel ends everything in the pod.

mod container;
mod failure;
mod image_volume;
mod main_loop;
pub mod message;
mod own_program;
mod program;
mod start;
mod terminal;
mod user;

pub use main_loop::run;
