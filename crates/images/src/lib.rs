//! Container images: pulls, verifies, stores and unpacks them, and removes unused ones.
//!
//! Start reading at [`ensure`], which makes an image ready to run. Compressed blobs are in an [`ImageStore`] that
//! all nodes share, unpacked layers in a directory of [`Layers`] on each node. [`registry`] is the client for
//! registries, [`puller`] pulls in separate processes, [`archive`] reads and writes `docker save` archives and OCI layouts. Input from outside (archives,
//! manifests, registries' responses) is treated as hostile.
//!
//! This crate knows nothing of pods: its callers provide the credentials and decide when to retry a failed pull.

// Some development dependencies are used only by the tests in `tests/`.
#![cfg_attr(not(test), warn(unused_crate_dependencies))]

pub mod archive;
mod compression;
mod error;
mod layers;
mod manifest;
mod progress;
mod pull;
pub mod puller;
mod reference;
pub mod registry;
mod store;

pub use download::{Digest, DigestError, error_chain};
pub use error::{ImageError, PullError};
pub use layers::{ImageGcPolicy, ImageLimits, LayerError, LayerHold, Layers, UnpackError};
pub use manifest::{Descriptor, DocumentError, ImageConfig, architecture};
pub use progress::{NoProgress, PullEvent, PullProgress};
pub use pull::{LocalImage, PullPolicy, PullRequest, ensure, pull};
pub use reference::{Reference, ReferenceError};
pub use registry::{RegistryConfig, RegistryCredential, RegistrySecret};
pub use store::{ImageStore, ImageStoreError, ImageSummary, PruneOptions, PruneReport};
