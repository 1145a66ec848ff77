//! The files of a volume, from API objects. Pure functions: callers provide the objects.
//!
//! ```text
//!   keys.rs        configMap, secret: keys → files
//!   fields.rs      fieldRef: labels, annotations, names
//!   resources.rs   resourceFieldRef: limits and requests, divided
//!   downward.rs    downwardAPI
//!   trust.rs       clusterTrustBundle: CA certificates
//!   pem.rs         certificates in PEM
//!   projected.rs   projected volumes: all of these, tokens and pod certificates
//! ```
//!
//! Paths are not trusted: [`check_path`] runs again where files are written.

mod downward;
mod fields;
mod keys;
pub mod pem;
mod projected;
mod resources;
mod trust;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use downward::downward_api;
pub use fields::{field, format_map};
pub use keys::{KeySelection, config_map, secret};
pub use projected::{CredentialBundle, VolumeInputs, common_user, projected};
pub use resources::resource;
pub use trust::{TrustBundles, trust_anchors};

/// The API's default for `defaultMode`.
const DEFAULT_MODE: i32 = 0o644;

/// The files of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    /// Files by path relative to the volume's root.
    pub files: BTreeMap<String, FileContent>,
    /// Directories to create as mount points of nested volumes, because the volume is read-only.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub mount_points: BTreeSet<String>,
}

/// Content and metadata of one file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileContent {
    /// The bytes.
    #[serde(with = "base64_text")]
    pub data: Vec<u8>,
    /// The permission bits.
    pub mode: u32,
    /// The owner, if not root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<i64>,
}

/// Omits the content, which may be secret.
impl std::fmt::Debug for FileContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, mode {:o}", self.data.len(), self.mode)?;
        match self.user {
            Some(user) => write!(f, ", user {user}"),
            None => Ok(()),
        }
    }
}

/// The files of a volume cannot be determined. The messages are upstream's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContentError {
    /// A required object is missing.
    #[error("{kind} {name:?} not found")]
    NotFound {
        /// `configmap`, `secret` or `clustertrustbundle.certificates.k8s.io`.
        kind: &'static str,
        /// The object's name.
        name: String,
    },
    /// A config map lacks a key.
    #[error("configmap references non-existent config key: {0}")]
    NoConfigKey(String),
    /// A secret lacks a key.
    #[error("references non-existent secret key: {0}")]
    NoSecretKey(String),
    /// A fieldRef to a field that volumes do not support.
    #[error("unsupported fieldPath: {0}")]
    UnsupportedField(String),
    /// A fieldRef with a subscript of a field that is not a map.
    #[error("fieldPath {0:?} does not support subscript")]
    UnsupportedSubscript(String),
    /// A resourceFieldRef to an unknown resource.
    #[error("unsupported container resource : {0}")]
    UnsupportedResource(String),
    /// A resourceFieldRef to an unknown container.
    #[error("container {0} not found")]
    ContainerNotFound(String),
    /// A malformed quantity.
    #[error("quantity {0:?} is not a number")]
    InvalidQuantity(String),
    /// A path that leaves the volume or is malformed.
    #[error("invalid path: {0}")]
    Path(String),
    /// The kubelet has not received the trust bundles yet.
    #[error("failed to sync clustertrustbundle cache: timed out waiting for the condition")]
    TrustBundlesNotSynced,
    /// A clusterTrustBundle source without name and signer.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    TrustBundleUnspecified,
    /// A clusterTrustBundle source that selects nothing.
    #[error(
        "combination of signerName and labelSelector matched zero ClusterTrustBundles: signerName {signer:?}, labelSelector {labels}"
    )]
    NoTrustBundles {
        /// The signer's name.
        signer: String,
        /// The label selector as text.
        labels: String,
    },
    /// A malformed label selector.
    #[error("while parsing label selector: {0}")]
    Selector(String),
    /// The kubelet has not obtained the certificate.
    #[error("{0}")]
    NoCertificate(String),
    /// The kubelet has not obtained the token.
    #[error("failed to fetch token: {0}")]
    NoToken(String),
    /// More than one error.
    #[error("[{}]", join_messages(.0))]
    Several(Vec<ContentError>),
}

impl ContentError {
    /// Returns all errors as one; a single error is returned unchanged.
    fn combine(mut errors: Vec<Self>) -> Result<(), Self> {
        errors.dedup();
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => Err(Self::Several(errors)),
        }
    }
}

fn join_messages(errors: &[ContentError]) -> String {
    let messages: Vec<_> = errors.iter().map(ToString::to_string).collect();
    messages.join(", ")
}

/// Rejects a path that could leave the volume or collide with the files of the atomic update (`..data`).
pub fn check_path(path: &str) -> Result<(), ContentError> {
    let reject = |reason: &str| Err(ContentError::Path(format!("{reason}: {path}")));
    if path.is_empty() {
        return Err(ContentError::Path("must not be empty: \"\"".to_owned()));
    }
    if path.starts_with('/') {
        return reject("must be relative path");
    }
    if path.len() > 4096 {
        return Err(ContentError::Path(
            "must be less than or equal to 4096 characters".to_owned(),
        ));
    }
    if path.contains('\0') {
        return Err(ContentError::Path("must not contain NUL".to_owned()));
    }
    if path.split('/').any(|part| part == "..") {
        return reject("must not contain '..'");
    }
    if path.split('/').any(|part| part.len() > 255) {
        return Err(ContentError::Path(
            "filenames must be less than or equal to 255 characters".to_owned(),
        ));
    }
    if path.starts_with("..") {
        return reject("must not start with '..'");
    }
    if clean(path).is_empty() {
        return reject("must name a file");
    }
    Ok(())
}

/// A checked path without `.` and repeated slashes.
pub fn clean(path: &str) -> String {
    let parts: Vec<_> = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    parts.join("/")
}

/// The mode of a file: the item's mode, else the volume's default.
fn mode(item: Option<i32>, default: Option<i32>) -> u32 {
    let mode = item.or(default).unwrap_or(DEFAULT_MODE);
    // The API server accepts only 0 to 0777.
    u32::try_from(mode).unwrap_or_default() & 0o777
}

mod base64_text {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(data: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&STANDARD.encode(data))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        STANDARD.decode(text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_path_rejects_unsafe_paths() {
        for good in ["a", "a/b", ".hidden", "a..b", "a/..b", "./a", "a//b", "a."] {
            assert_eq!(check_path(good), Ok(()), "{good}");
        }
        let long = "x".repeat(256);
        let longer = "x/".repeat(2049);
        let bad = [
            "", "/a", "..", "a/../b", "../a", "..data", "..a/b", ".", "./", "a\0b", &long, &longer,
        ];
        let messages: Vec<_> = bad
            .iter()
            .map(|path| check_path(path).unwrap_err().to_string())
            .collect();
        insta::assert_debug_snapshot!(messages);
        assert_eq!(clean("./a//b/./c/"), "a/b/c");
    }

    #[test]
    fn content_is_base64_and_not_in_debug() {
        let file = FileContent {
            data: vec![0, 255],
            mode: 0o600,
            user: None,
        };
        let text = serde_json::to_string(&file).unwrap();
        assert_eq!(text, r#"{"data":"AP8=","mode":384}"#);
        assert_eq!(serde_json::from_str::<FileContent>(&text).unwrap(), file);
        assert_eq!(format!("{file:?}"), "2 bytes, mode 600");
    }
}
