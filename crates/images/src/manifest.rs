//! The JSON documents of an image: manifests, indexes and configurations, in OCI's and Docker's (schema 2) formats,
//! which differ only in their media types.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use download::Digest;

/// The largest manifest, index or configuration, in bytes.
pub const MAX_DOCUMENT_SIZE: u64 = 4 << 20;

/// overlayfs's limit for lower directories.
pub const MAX_LAYERS: usize = 500;

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_SCHEMA1: &str = "application/vnd.docker.distribution.manifest.v1";

/// OCI's descriptor: a blob's type, digest and size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// The media type; may be empty.
    #[serde(default)]
    pub media_type: String,
    /// The digest.
    pub digest: Digest,
    /// The size in bytes.
    pub size: u64,
    /// In an index: the platform of the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Annotations, such as the image's name in an archive.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "nullable"
    )]
    pub annotations: BTreeMap<String, String>,
}

/// The platform of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`.
    #[serde(default)]
    pub os: String,
    /// `amd64` and the like.
    #[serde(default)]
    pub architecture: String,
    /// The variant, such as `v7` of `arm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// One image: its configuration and its layers, lowest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// OCI's or Docker's media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The configuration.
    pub config: Descriptor,
    /// The layers.
    pub layers: Vec<Descriptor>,
}

/// A list of manifests, one per platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// OCI's or Docker's media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The manifests.
    pub manifests: Vec<Descriptor>,
}

/// A manifest or an index: the target of a reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// A single image.
    Manifest(Manifest),
    /// A multi-platform image.
    Index(Index),
}

/// A document is not a usable manifest, index or configuration.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Not JSON, or of another form.
    #[error("{document} is malformed")]
    Malformed {
        /// The type of document.
        document: &'static str,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// Not an image, or one that this crate does not support.
    #[error("{0}")]
    Unsupported(String),
    /// The image is not for this machine's platform.
    #[error("no match for platform linux/{wanted} in manifest: it has {}", join_or_nothing(.found))]
    NoPlatform {
        /// This machine's architecture.
        wanted: &'static str,
        /// The platforms that the image has.
        found: Vec<String>,
    },
}

fn join_or_nothing(found: &[String]) -> String {
    match found {
        [] => "nothing".to_owned(),
        some => some.join(", "),
    }
}

impl Document {
    /// Parses a manifest or an index. The content decides which, since the media type may be missing.
    pub fn parse(bytes: &[u8], media_type: &str) -> Result<Document, DocumentError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Shape {
            #[serde(default)]
            schema_version: u32,
            media_type: Option<String>,
            manifests: Option<serde::de::IgnoredAny>,
            #[serde(default)]
            layers: Option<serde::de::IgnoredAny>,
        }
        let malformed = |document| move |source| DocumentError::Malformed { document, source };
        let shape: Shape = serde_json::from_slice(bytes).map_err(malformed("the manifest"))?;
        let media_type = shape.media_type.as_deref().unwrap_or(media_type);
        if shape.schema_version == 1 || media_type.starts_with(DOCKER_SCHEMA1) {
            return Err(DocumentError::Unsupported(
                "it is in Docker's schema 1, which is no longer supported: push it again with a current tool"
                    .to_owned(),
            ));
        }
        // A document with both lists would be different images for different clients.
        match (shape.manifests.is_some(), shape.layers.is_some()) {
            (true, false) => serde_json::from_slice(bytes)
                .map(Document::Index)
                .map_err(malformed("the index")),
            (false, true) => {
                let manifest: Manifest =
                    serde_json::from_slice(bytes).map_err(malformed("the manifest"))?;
                manifest.check()?;
                Ok(Document::Manifest(manifest))
            }
            _ => Err(DocumentError::Unsupported(format!(
                "it is not an image but {}",
                match media_type {
                    "" => "something else",
                    media_type => media_type,
                }
            ))),
        }
    }
}

impl Manifest {
    fn check(&self) -> Result<(), DocumentError> {
        if self.layers.len() > MAX_LAYERS {
            return Err(DocumentError::Unsupported(format!(
                "it has {} layers, and the limit is {MAX_LAYERS}",
                self.layers.len()
            )));
        }
        if self.config.size > MAX_DOCUMENT_SIZE {
            return Err(DocumentError::Unsupported(format!(
                "its configuration has {} bytes, which is too large",
                self.config.size
            )));
        }
        Ok(())
    }

    /// The compressed size of configuration and layers.
    pub fn size(&self) -> u64 {
        self.layers
            .iter()
            .map(|layer| layer.size)
            .fold(self.config.size, u64::saturating_add)
    }

    /// The configuration and the layers.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        std::iter::once(&self.config).chain(&self.layers)
    }
}

impl Index {
    /// The manifest for this machine.
    pub fn choose(&self) -> Result<&Descriptor, DocumentError> {
        let matches_platform = |descriptor: &&Descriptor| {
            descriptor.platform.as_ref().is_some_and(|platform| {
                platform.os == "linux" && platform.architecture == architecture()
            })
        };
        // Of several variants, prefer the baseline.
        let is_baseline = |descriptor: &&Descriptor| {
            let variant = descriptor
                .platform
                .as_ref()
                .and_then(|p| p.variant.as_deref());
            matches!(variant, None | Some("" | "v1" | "v8"))
        };
        let mut candidates = self.manifests.iter().filter(matches_platform);
        if let Some(best) = candidates
            .clone()
            .find(is_baseline)
            .or_else(|| candidates.next())
        {
            return Ok(best);
        }
        // Indexes in archives often have one manifest without a platform.
        if let [only] = self.manifests.as_slice()
            && only.platform.is_none()
        {
            return Ok(only);
        }
        let found = self.manifests.iter().filter_map(|d| d.platform.as_ref());
        Err(DocumentError::NoPlatform {
            wanted: architecture(),
            found: found
                .filter(|p| p.os != "unknown")
                .map(|p| format!("{}/{}", p.os, p.architecture))
                .collect(),
        })
    }
}

/// The `config` of the image configuration: the defaults for a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// ENTRYPOINT.
    pub entrypoint: Vec<String>,
    /// CMD.
    pub cmd: Vec<String>,
    /// ENV, as `NAME=value`.
    pub env: Vec<String>,
    /// USER: a name or a number, perhaps with `:group`.
    pub user: String,
    /// WORKDIR.
    pub working_dir: String,
    /// STOPSIGNAL.
    pub stop_signal: Option<String>,
    /// VOLUME.
    pub volumes: Vec<String>,
    /// EXPOSE, as `80/tcp`.
    pub exposed_ports: Vec<String>,
}

/// OCI's image configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageConfiguration {
    /// The defaults for a container.
    pub config: ImageConfig,
    /// The digests of the uncompressed layers, lowest first.
    pub diff_ids: Vec<Digest>,
    /// The build time that the image states.
    pub created: Option<String>,
}

impl ImageConfiguration {
    /// Parses the configuration of an image with `layers` layers.
    pub fn parse(bytes: &[u8], layers: usize) -> Result<ImageConfiguration, DocumentError> {
        let file: ConfigFile =
            serde_json::from_slice(bytes).map_err(|source| DocumentError::Malformed {
                document: "the configuration",
                source,
            })?;
        if file.rootfs.diff_ids.len() != layers {
            return Err(DocumentError::Unsupported(format!(
                "its manifest has {layers} layers, but its configuration has {}",
                file.rootfs.diff_ids.len()
            )));
        }
        let differs = |actual: &str, expected: &str| !actual.is_empty() && actual != expected;
        if differs(&file.os, "linux") || differs(&file.architecture, architecture()) {
            return Err(DocumentError::NoPlatform {
                wanted: architecture(),
                found: vec![format!("{}/{}", file.os, file.architecture)],
            });
        }
        let config = file.config;
        Ok(ImageConfiguration {
            config: ImageConfig {
                entrypoint: config.entrypoint,
                cmd: config.cmd,
                env: config.env,
                user: config.user,
                working_dir: config.working_dir,
                stop_signal: config.stop_signal.filter(|signal| !signal.is_empty()),
                volumes: config.volumes.into_keys().collect(),
                exposed_ports: config.exposed_ports.into_keys().collect(),
            },
            diff_ids: file.rootfs.diff_ids,
            created: file.created,
        })
    }
}

/// This machine's architecture, as OCI (GOARCH) names it.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

#[derive(Deserialize)]
struct ConfigFile {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    created: Option<String>,
    #[serde(default, deserialize_with = "nullable")]
    config: RunConfig,
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    #[serde(default, deserialize_with = "nullable")]
    diff_ids: Vec<Digest>,
}

/// Go encodes nil slices and maps as null.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    #[serde(deserialize_with = "nullable")]
    entrypoint: Vec<String>,
    #[serde(deserialize_with = "nullable")]
    cmd: Vec<String>,
    #[serde(deserialize_with = "nullable")]
    env: Vec<String>,
    #[serde(deserialize_with = "nullable")]
    user: String,
    #[serde(deserialize_with = "nullable")]
    working_dir: String,
    stop_signal: Option<String>,
    #[serde(deserialize_with = "nullable")]
    volumes: BTreeMap<String, serde::de::IgnoredAny>,
    #[serde(deserialize_with = "nullable")]
    exposed_ports: BTreeMap<String, serde::de::IgnoredAny>,
}

fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(os: &str, architecture: &str, variant: Option<&str>, content: &[u8]) -> Descriptor {
        Descriptor {
            media_type: OCI_MANIFEST.into(),
            digest: Digest::of(content),
            size: 1,
            platform: Some(Platform {
                os: os.into(),
                architecture: architecture.into(),
                variant: variant.map(str::to_owned),
            }),
            annotations: BTreeMap::new(),
        }
    }

    fn index(manifests: Vec<Descriptor>) -> Index {
        Index {
            schema_version: 2,
            media_type: None,
            manifests,
        }
    }

    #[test]
    fn index_prefers_the_baseline_variant() {
        let here = architecture();
        let chosen = index(vec![
            entry("windows", here, None, b"w"),
            entry("linux", "s390x", None, b"s"),
            entry("linux", here, Some("v3"), b"3"),
            entry("linux", here, None, b"plain"),
            entry("unknown", "unknown", None, b"attestation"),
        ]);
        assert_eq!(chosen.choose().unwrap().digest, Digest::of(b"plain"));
        let only = index(vec![entry("linux", here, Some("v3"), b"3")]);
        assert_eq!(only.choose().unwrap().digest, Digest::of(b"3"));
        let none = index(vec![
            entry("linux", "s390x", None, b"s"),
            entry("unknown", "unknown", None, b"a"),
        ]);
        assert_eq!(
            none.choose().unwrap_err().to_string(),
            format!("no match for platform linux/{here} in manifest: it has linux/s390x")
        );
    }

    #[test]
    fn content_decides_between_manifest_and_index() {
        let config = format!(r#"{{"digest":"{}","size":2}}"#, Digest::of(b"{}"));
        let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[]}}"#);
        assert!(matches!(
            Document::parse(manifest.as_bytes(), ""),
            Ok(Document::Manifest(_))
        ));
        assert!(matches!(
            Document::parse(br#"{"schemaVersion":2,"manifests":[]}"#, ""),
            Ok(Document::Index(_))
        ));
        let both = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[],"manifests":[]}}"#);
        let schema1 = r#"{"schemaVersion":1,"layers":[]}"#;
        for bad in ["", "null", "[]", "{}", "<html>", &both, schema1] {
            assert!(Document::parse(bad.as_bytes(), "").is_err(), "{bad}");
        }
    }

    #[test]
    fn configurations_of_go_are_parsed() {
        let text = format!(
            r#"{{"architecture":"{}","os":"linux","created":"2024-01-01T00:00:00Z",
               "config":{{"Env":["A=b"],"Entrypoint":null,"Cmd":["sh"],"Volumes":{{"/data":{{}}}},
               "ExposedPorts":{{"80/tcp":{{}}}},"StopSignal":"SIGQUIT","OnBuild":null}},
               "rootfs":{{"type":"layers","diff_ids":["{}"]}},"history":[]}}"#,
            architecture(),
            Digest::of(b"")
        );
        let parsed = ImageConfiguration::parse(text.as_bytes(), 1).unwrap();
        assert_eq!(parsed.config.cmd, ["sh"]);
        assert_eq!(parsed.config.volumes, ["/data"]);
        assert_eq!(parsed.config.exposed_ports, ["80/tcp"]);
        assert_eq!(parsed.config.stop_signal.as_deref(), Some("SIGQUIT"));
        assert!(ImageConfiguration::parse(text.as_bytes(), 2).is_err());
        let foreign = text.replace(architecture(), "s390x");
        assert!(ImageConfiguration::parse(foreign.as_bytes(), 1).is_err());
        assert!(
            ImageConfiguration::parse(br#"{"rootfs":{"diff_ids":null},"config":null}"#, 0).is_ok()
        );
    }
}
