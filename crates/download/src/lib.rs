//! Downloads of files whose digest is known: resumed after a broken connection, also by a later process, and verified.
//!
//! Start reading at [`download`]. The caller sends the requests, so this crate knows neither URLs nor credentials, nor where
//! a file is kept after its download.

#![cfg_attr(not(test), warn(unused_crate_dependencies))]

mod client;
mod digest;
mod failure;
mod partial_file;
mod transfer;

pub use client::{body, client_builder};
pub use digest::{Digest, DigestError, Hasher, HashingReader};
pub use failure::{DownloadError, DownloadFailure, error_chain};
pub use partial_file::PartialFile;
pub use transfer::{DownloadEvent, FileSize, download, download_small};
