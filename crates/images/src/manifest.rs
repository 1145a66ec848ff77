//! Manifests, indexes and configurations: the JSON that ties an image together, in OCI's form and in
//! Docker's (schema 2), which differ only in their media types.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// No manifest, index or configuration may be larger.
pub const LARGEST_DOCUMENT: u64 = 4 << 20;

/// overlayfs stacks no more.
pub const MOST_LAYERS: usize = 500;

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_SCHEMA1: &str = "application/vnd.docker.distribution.manifest.v1";

/// Something in the store or on a registry, by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// In an index: the machines that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Notes, such as its name in an archive.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "nullable"
    )]
    pub annotations: BTreeMap<String, String>,
}

/// The machines that an image is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`.
    #[serde(default)]
    pub os: String,
    /// `amd64` and the like.
    #[serde(default)]
    pub architecture: String,
    /// A refinement, such as `v7` of `arm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// One image: its configuration and its layers, the lowest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// OCI's or Docker's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The configuration.
    pub config: Descriptor,
    /// The layers.
    pub layers: Vec<Descriptor>,
}

/// Several manifests, one for each platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// OCI's or Docker's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The manifests.
    pub manifests: Vec<Descriptor>,
}

/// What a reference stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// One image.
    Manifest(Manifest),
    /// Several, to choose from.
    Index(Index),
}

/// The JSON isn't an image.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// No JSON, or not of this form.
    #[error("{what} is malformed")]
    Malformed {
        /// Manifest, index or configuration.
        what: &'static str,
        /// In which way.
        source: serde_json::Error,
    },
    /// Something that isn't an image of today.
    #[error("{0}")]
    Unsupported(String),
    /// None of an index is for this machine.
    #[error("no match for platform linux/{wanted} in manifest: it has {}", list(.found))]
    NoPlatform {
        /// This machine's architecture.
        wanted: &'static str,
        /// What there is.
        found: Vec<String>,
    },
}

fn list(found: &[String]) -> String {
    match found {
        [] => "nothing".to_owned(),
        some => some.join(", "),
    }
}

impl Document {
    /// Reads a manifest or an index; the content decides which, the media type may be missing.
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
        let malformed = |what| move |source| DocumentError::Malformed { what, source };
        let shape: Shape = serde_json::from_slice(bytes).map_err(malformed("the manifest"))?;
        let said = shape.media_type.as_deref().unwrap_or(media_type);
        if shape.schema_version == 1 || said.starts_with(DOCKER_SCHEMA1) {
            return Err(DocumentError::Unsupported(
                "it is in Docker's schema 1, which nobody supports any more: push it again with a current tool"
                    .to_owned(),
            ));
        }
        // Both lists at once would let two readers see two different images.
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
                "it is no image but {}",
                match said {
                    "" => "something else",
                    said => said,
                }
            ))),
        }
    }
}

impl Manifest {
    fn check(&self) -> Result<(), DocumentError> {
        if self.layers.len() > MOST_LAYERS {
            return Err(DocumentError::Unsupported(format!(
                "it has {} layers, and {MOST_LAYERS} are possible",
                self.layers.len()
            )));
        }
        if self.config.size > LARGEST_DOCUMENT {
            return Err(DocumentError::Unsupported(format!(
                "its configuration is {} bytes large",
                self.config.size
            )));
        }
        Ok(())
    }

    /// The size of everything that has to be downloaded.
    pub fn size(&self) -> u64 {
        self.layers
            .iter()
            .map(|layer| layer.size)
            .fold(self.config.size, u64::saturating_add)
    }

    /// Everything that it needs.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        std::iter::once(&self.config).chain(&self.layers)
    }
}

impl Index {
    /// The image for this machine.
    pub fn choose(&self) -> Result<&Descriptor, DocumentError> {
        let fits = |descriptor: &&Descriptor| {
            descriptor.platform.as_ref().is_some_and(|platform| {
                platform.os == "linux" && platform.architecture == architecture()
            })
        };
        // Of several, the one that needs nothing special of the processor.
        let plain = |descriptor: &&Descriptor| {
            let variant = descriptor
                .platform
                .as_ref()
                .and_then(|p| p.variant.as_deref());
            matches!(variant, None | Some("" | "v1" | "v8"))
        };
        let mut fitting = self.manifests.iter().filter(fits);
        if let Some(best) = fitting.clone().find(plain).or_else(|| fitting.next()) {
            return Ok(best);
        }
        // An index of one that doesn't say what it is for, as archives have it.
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

/// The image's configuration, as far as it matters for running it.
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

/// A configuration: what to run, and the digests of the unpacked layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    /// What to run.
    pub config: ImageConfig,
    /// The digests of the layers' tar archives, the lowest first.
    pub diff_ids: Vec<Digest>,
    /// When the image was built, as it says itself.
    pub created: Option<String>,
}

impl Configuration {
    /// Reads the configuration of an image with so many layers.
    pub fn parse(bytes: &[u8], layers: usize) -> Result<Configuration, DocumentError> {
        let file: ConfigFile =
            serde_json::from_slice(bytes).map_err(|source| DocumentError::Malformed {
                what: "the configuration",
                source,
            })?;
        if file.rootfs.diff_ids.len() != layers {
            return Err(DocumentError::Unsupported(format!(
                "its manifest has {layers} layers and its configuration {}",
                file.rootfs.diff_ids.len()
            )));
        }
        let foreign = |have: &str, want: &str| !have.is_empty() && have != want;
        if foreign(&file.os, "linux") || foreign(&file.architecture, architecture()) {
            return Err(DocumentError::NoPlatform {
                wanted: architecture(),
                found: vec![format!("{}/{}", file.os, file.architecture)],
            });
        }
        let run = file.config;
        Ok(Configuration {
            config: ImageConfig {
                entrypoint: run.entrypoint,
                cmd: run.cmd,
                env: run.env,
                user: run.user,
                working_dir: run.working_dir,
                stop_signal: run.stop_signal.filter(|signal| !signal.is_empty()),
                volumes: run.volumes.into_keys().collect(),
                exposed_ports: run.exposed_ports.into_keys().collect(),
            },
            diff_ids: file.rootfs.diff_ids,
            created: file.created,
        })
    }
}

/// This machine's architecture by the name that images use.
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

/// Go writes empty lists and maps as null.
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
    fn the_plain_image_of_this_machine_is_chosen() {
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
    fn documents_are_told_apart_by_content() {
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
    fn configurations_as_go_writes_them() {
        let text = format!(
            r#"{{"architecture":"{}","os":"linux","created":"2024-01-01T00:00:00Z",
               "config":{{"Env":["A=b"],"Entrypoint":null,"Cmd":["sh"],"Volumes":{{"/data":{{}}}},
               "ExposedPorts":{{"80/tcp":{{}}}},"StopSignal":"SIGQUIT","OnBuild":null}},
               "rootfs":{{"type":"layers","diff_ids":["{}"]}},"history":[]}}"#,
            architecture(),
            Digest::of(b"")
        );
        let parsed = Configuration::parse(text.as_bytes(), 1).unwrap();
        assert_eq!(parsed.config.cmd, ["sh"]);
        assert_eq!(parsed.config.volumes, ["/data"]);
        assert_eq!(parsed.config.exposed_ports, ["80/tcp"]);
        assert_eq!(parsed.config.stop_signal.as_deref(), Some("SIGQUIT"));
        assert!(Configuration::parse(text.as_bytes(), 2).is_err());
        let foreign = text.replace(architecture(), "s390x");
        assert!(Configuration::parse(foreign.as_bytes(), 1).is_err());
        assert!(Configuration::parse(br#"{"rootfs":{"diff_ids":null},"config":null}"#, 0).is_ok());
    }
}
