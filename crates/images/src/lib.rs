//! Container images: pulled from registries, verified, stored, unpacked and collected when nobody needs
//! them any more.
//!
//! Start reading at [`ensure`], which makes an image ready to run. Compressed blobs lie in a [`Store`] that
//! all nodes share, unpacked layers in a directory of [`Layers`] on each node. [`registry`] speaks with
//! registries, [`archive`] with `docker save` and OCI layouts. Everything that comes from outside (archives,
//! manifests, registries' answers) is taken for hostile.
//!
//! This crate knows nothing of pods: whose secrets its credentials were, and when a failed pull is tried
//! again, is decided elsewhere.

pub mod archive;
mod compression;
mod digest;
mod error;
mod layers;
mod manifest;
mod progress;
pub mod protocol;
mod pull;
mod reference;
pub mod registry;
mod store;

pub use digest::{Digest, DigestError};
pub use error::{ImageError, PullError, causes};
pub use layers::{Held, LayerError, Layers, Limits, UnpackError};
pub use manifest::{Descriptor, DocumentError, ImageConfig, architecture};
pub use progress::{Event, Progress, Quiet};
pub use pull::{Image, PullPolicy, PullRequest, ensure, pull};
pub use reference::{Reference, ReferenceError};
pub use registry::{Credential, RegistryConfig, Secret};
pub use store::{Collected, Prune, Store, StoreError, Summary};
