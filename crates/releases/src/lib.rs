//! Releases of upstream Kubernetes: finding the one to run, downloading or importing it, and the seeds (prepared stores) that
//! new clusters start from.
//!
//! Start reading at [`Release::find`]. Only the store writes to where releases are; [`fetch`] and [`import`] bring them
//! there. This crate starts no control plane: the caller of [`seed::ensure`] does that.

mod archive;
mod download;
mod elf;
mod error;
mod fetch;
mod import;
mod part;
mod probe;
mod release;
pub mod seed;
mod store;
mod version;

pub use error::FetchError;
pub use fetch::{FetchOptions, fetch};
pub use import::{ImportError, ImportOptions, import};
pub use release::{Candidate, Component, Release, ReleaseError, Search};
pub use version::{PINNED_ETCD, PINNED_KUBERNETES, Version};
