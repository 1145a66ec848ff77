//! Test images, and directories for them.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "not every test uses every helper"
)]

use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;

use images::{
    Digest, ImageStore, Layers, PullEvent, PullPolicy, PullProgress, PullRequest, RegistryConfig,
};
use serde_json::{Value, json};

/// The compression of a layer.
#[derive(Debug, Clone, Copy)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

pub fn pack(bytes: &[u8], packing: Packing) -> Vec<u8> {
    match packing {
        Packing::Plain => bytes.to_vec(),
        Packing::Zstd => zstd::encode_all(bytes, 1).unwrap(),
        Packing::Gzip => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
    }
}

/// A tar archive of files.
pub fn layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        tar.append_data(&mut header, name, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

/// The blobs of an image.
#[derive(Debug, Clone)]
pub struct TestImage {
    pub manifest: Vec<u8>,
    pub media_type: &'static str,
    pub config: Vec<u8>,
    pub layers: Vec<Vec<u8>>,
}

pub const OCI: &str = "application/vnd.oci.image.manifest.v1+json";
pub const DOCKER: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

pub fn config(diff_ids: &[Digest], architecture: &str) -> Vec<u8> {
    json!({
        "architecture": architecture, "os": "linux",
        "config": {"Cmd": ["/bin/app"], "Env": ["PATH=/bin"], "User": "1000", "WorkingDir": "/srv"},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    })
    .to_string()
    .into_bytes()
}

pub fn descriptor(bytes: &[u8], media_type: &str) -> Value {
    json!({"mediaType": media_type, "digest": Digest::of(bytes), "size": bytes.len()})
}

impl TestImage {
    pub fn new(archives: &[(Vec<u8>, Packing)], media_type: &'static str) -> TestImage {
        let ids: Vec<_> = archives
            .iter()
            .map(|(bytes, _)| Digest::of(bytes))
            .collect();
        let config = config(&ids, images::architecture());
        let layers: Vec<_> = archives
            .iter()
            .map(|(bytes, packing)| pack(bytes, *packing))
            .collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": media_type,
            "config": descriptor(&config, "application/vnd.oci.image.config.v1+json"),
            "layers": layers.iter().map(|l| descriptor(l, "application/vnd.oci.image.layer.v1.tar")).collect::<Vec<_>>(),
        });
        TestImage {
            manifest: manifest.to_string().into_bytes(),
            media_type,
            config,
            layers,
        }
    }

    /// Three layers, each with another compression.
    pub fn usual(media_type: &'static str) -> TestImage {
        TestImage::new(
            &[
                (
                    layer(&[("bin/app", b"one"), ("etc/old", b"x")]),
                    Packing::Gzip,
                ),
                (
                    layer(&[("bin/app", b"two"), ("etc/.wh.old", b"")]),
                    Packing::Zstd,
                ),
                (layer(&[("srv/data", &[7; 300_000])]), Packing::Plain),
            ],
            media_type,
        )
    }

    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    pub fn blobs(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.layers.iter().chain([&self.config])
    }
}

/// A store and the layers of one node.
pub struct TestNode {
    pub dir: tempfile::TempDir,
    pub store: ImageStore,
    pub layers: Layers,
}

impl TestNode {
    pub fn new() -> TestNode {
        let dir = tempfile::tempdir().unwrap();
        let store = ImageStore::open(&dir.path().join("store")).unwrap();
        let layers = Layers::open(&dir.path().join("layers")).unwrap();
        TestNode { dir, store, layers }
    }

    /// The layers of another node with the same store.
    pub fn other_node(&self, name: &str) -> Layers {
        Layers::open(&self.dir.path().join(name)).unwrap()
    }

    pub fn blobs(&self) -> Vec<PathBuf> {
        let dir = self.store.path().join("blobs/sha256");
        let all = std::fs::read_dir(dir).unwrap().flatten();
        all.map(|entry| entry.path()).collect()
    }
}

/// Parses a `registries.toml`.
pub fn read_config(text: &str) -> RegistryConfig {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("registries.toml");
    std::fs::write(&path, text).unwrap();
    RegistryConfig::read(&path).unwrap()
}

/// A configuration that allows plain HTTP for these registries.
pub fn insecure(addresses: &[impl std::fmt::Display]) -> RegistryConfig {
    let rule = |address| format!("[registry.\"{address}\"]\ninsecure = true\n");
    read_config(&addresses.iter().map(rule).collect::<String>())
}

pub fn request(reference: &str, policy: PullPolicy) -> PullRequest {
    PullRequest {
        reference: reference.to_owned(),
        policy,
        credentials: Vec::new(),
    }
}

/// Records progress events.
#[derive(Default)]
pub struct Recorder(pub Mutex<Vec<PullEvent>>);

impl PullProgress for Recorder {
    fn event(&self, event: PullEvent) {
        self.0.lock().unwrap().push(event);
    }
}

impl Recorder {
    pub fn count(&self, wanted: impl Fn(&PullEvent) -> bool) -> usize {
        self.0
            .lock()
            .unwrap()
            .iter()
            .filter(|event| wanted(event))
            .count()
    }

    pub fn notes(&self) -> Vec<String> {
        let note = |event: &PullEvent| match event {
            PullEvent::Note { text } => Some(text.clone()),
            _ => None,
        };
        self.0.lock().unwrap().iter().filter_map(note).collect()
    }
}
