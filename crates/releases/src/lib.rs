//! Releases of upstream Kubernetes: finds the one to run, downloads or imports releases, and keeps the seeds (prepared stores) from
//! which new clusters start.
//!
//! Start reading at [`Release::find`]. Only the store writes to the directories of releases; [`fetch`] and [`import`] use it. This crate
//! knows no clusters and starts no control plane: the caller of [`seed::ensure`] does that.

#![warn(unused_crate_dependencies)]

mod archive;
mod elf;
mod error;
mod fetch;
mod file_download;
mod import;
mod release;
pub mod seed;
mod store;
mod version;
mod version_probe;

pub use error::FetchError;
pub use fetch::{FetchOptions, fetch};
pub use import::{ImportError, ImportOptions, import};
pub use release::{InstalledRelease, Release, ReleaseComponent, ReleaseError, ReleaseSearch};
pub use version::{PINNED_ETCD, PINNED_KUBERNETES, ReleaseVersion};
