//! API objects → the files of a volume. Pure: whoever calls has asked the API server already.
//!
//! ```text
//!   keys.rs        configMap, secret: keys → files
//!   fields.rs      fieldRef: labels, annotations, names
//!   resources.rs   resourceFieldRef: limits and requests, divided
//!   downward.rs    downwardAPI
//!   trust.rs       clusterTrustBundle: certificates of authorities
//!   pem.rs         certificates as text
//!   projected.rs   all of these in one volume, tokens and a pod's own certificates
//! ```
//!
//! Paths are checked where files are written ([`check_path`]), whatever the source says.

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
pub use keys::{Selection, config_map, secret};
pub use projected::{Credentials, Inputs, common_user, projected};
pub use resources::resource;
pub use trust::{TrustBundles, trust_anchors};

/// The mode of files unless the volume says otherwise; the API server fills in the same.
const DEFAULT_MODE: i32 = 0o644;

/// The files of a volume, by path below its root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    /// By relative path.
    pub files: BTreeMap<String, FileContent>,
    /// Directories to make beside the files: the volume can't be written to, and others are to be mounted below it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub mount_points: BTreeSet<String>,
}

/// One file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileContent {
    /// Its bytes.
    #[serde(with = "base64_text")]
    pub data: Vec<u8>,
    /// Its permission bits.
    pub mode: u32,
    /// Its owner, if that isn't root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<i64>,
}

/// The content stays out of logs: it may be a secret.
impl std::fmt::Debug for FileContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, mode {:o}", self.data.len(), self.mode)?;
        match self.user {
            Some(user) => write!(f, ", user {user}"),
            None => Ok(()),
        }
    }
}

/// Why a volume's files can't be told, in upstream's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContentError {
    /// An object that isn't optional isn't there.
    #[error("{kind} {name:?} not found")]
    NotFound {
        /// `configmap`, `secret` or `clustertrustbundle.certificates.k8s.io`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// A config map lacks a key.
    #[error("configmap references non-existent config key: {0}")]
    NoConfigKey(String),
    /// A secret lacks a key.
    #[error("references non-existent secret key: {0}")]
    NoSecretKey(String),
    /// A fieldRef to something that volumes don't offer.
    #[error("unsupported fieldPath: {0}")]
    NoField(String),
    /// A fieldRef with a subscript where there is none.
    #[error("fieldPath {0:?} does not support subscript")]
    NoSubscript(String),
    /// A resourceFieldRef to an unknown resource.
    #[error("unsupported container resource : {0}")]
    NoResource(String),
    /// A resourceFieldRef to an unknown container.
    #[error("container {0} not found")]
    NoContainer(String),
    /// A number that is none.
    #[error("quantity {0:?} is no number")]
    NoNumber(String),
    /// A path that leaves the volume, or can't be one.
    #[error("invalid path: {0}")]
    Path(String),
    /// Nobody has told of trust bundles yet.
    #[error("failed to sync clustertrustbundle cache: timed out waiting for the condition")]
    NoTrustBundlesYet,
    /// A clusterTrustBundle that says neither which nor whose.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    NoTrustBundleNamed,
    /// A clusterTrustBundle that selects nothing.
    #[error(
        "combination of signerName and labelSelector matched zero ClusterTrustBundles: signerName {signer:?}, labelSelector {labels}"
    )]
    NoTrustBundles {
        /// Whose bundles.
        signer: String,
        /// Which of them, in words.
        labels: String,
    },
    /// A label selector that is none.
    #[error("while parsing label selector: {0}")]
    Selector(String),
    /// A certificate that the caller did not get.
    #[error("{0}")]
    NoCertificate(String),
    /// A token that the caller did not get.
    #[error("failed to fetch token: {0}")]
    NoToken(String),
    /// More than one of the above.
    #[error("[{}]", several(.0))]
    Several(Vec<ContentError>),
}

impl ContentError {
    /// One error is itself; several are told together.
    fn together(mut errors: Vec<Self>) -> Result<(), Self> {
        errors.dedup();
        match errors.len() {
            0 => Ok(()),
            1 => Err(errors.remove(0)),
            _ => Err(Self::Several(errors)),
        }
    }
}

fn several(errors: &[ContentError]) -> String {
    let words: Vec<_> = errors.iter().map(ToString::to_string).collect();
    words.join(", ")
}

/// Refuses a path that could lead out of a volume, or that hides what the atomic swap needs.
pub fn check_path(path: &str) -> Result<(), ContentError> {
    let refuse = |why: &str| Err(ContentError::Path(format!("{why}: {path}")));
    if path.is_empty() {
        return Err(ContentError::Path("must not be empty: \"\"".to_owned()));
    }
    if path.starts_with('/') {
        return refuse("must be relative path");
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
        return refuse("must not contain '..'");
    }
    if path.split('/').any(|part| part.len() > 255) {
        return Err(ContentError::Path(
            "filenames must be less than or equal to 255 characters".to_owned(),
        ));
    }
    if path.starts_with("..") {
        return refuse("must not start with '..'");
    }
    if clean(path).is_empty() {
        return refuse("must name a file");
    }
    Ok(())
}

/// A checked path without `.` and doubled slashes.
pub fn clean(path: &str) -> String {
    let parts: Vec<_> = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    parts.join("/")
}

/// The mode bits as the kernel takes them.
fn mode(item: Option<i32>, default: Option<i32>) -> u32 {
    let mode = item.or(default).unwrap_or(DEFAULT_MODE);
    // The API server lets only 0 to 0777 pass.
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
    fn paths_stay_in_the_volume() {
        for good in ["a", "a/b", ".hidden", "a..b", "a/..b", "./a", "a//b", "a."] {
            assert_eq!(check_path(good), Ok(()), "{good}");
        }
        let long = "x".repeat(256);
        let longer = "x/".repeat(2049);
        let bad = [
            "", "/a", "..", "a/../b", "../a", "..data", "..a/b", ".", "./", "a\0b", &long, &longer,
        ];
        let words: Vec<_> = bad
            .iter()
            .map(|path| check_path(path).unwrap_err().to_string())
            .collect();
        insta::assert_debug_snapshot!(words);
        assert_eq!(clean("./a//b/./c/"), "a/b/c");
    }

    #[test]
    fn bytes_travel_as_base64_and_stay_out_of_logs() {
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
