//! Loads and saves archives of Docker and OCI, and collects garbage afterwards.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use common::*;
use images::archive::{ArchiveFormat, LoadError, LoadedImage, load_directory, save};
use images::{
    Digest, ImageLimits, ImageStore, LocalImage, NoProgress, PruneOptions, PullPolicy, Reference,
    RegistryConfig, ensure,
};
use serde_json::json;

fn load(
    store: &ImageStore,
    archive: &[u8],
    name: Option<&Reference>,
) -> Result<Vec<LoadedImage>, LoadError> {
    images::archive::load(store, archive, name, ImageLimits::default())
}

async fn run(node: &TestNode, name: &str) -> LocalImage {
    let request = request(name, PullPolicy::Never);
    let config = RegistryConfig::default();
    ensure(&node.store, &node.layers, &request, &config, &NoProgress)
        .await
        .unwrap()
}

fn tar_of(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let files: Vec<_> = files
        .iter()
        .map(|(n, c)| (n.as_str(), c.as_slice()))
        .collect();
    layer(&files)
}

/// The archive format of `docker save` before version 25: layers in directories, the list at the end.
fn old_docker(names: &[&str]) -> Vec<u8> {
    let lower = layer(&[("bin/app", b"one"), ("etc/old", b"x")]);
    let upper = layer(&[("etc/.wh.old", b"")]);
    let config = config(
        &[Digest::of(&lower), Digest::of(&upper), Digest::of(&upper)],
        images::architecture(),
    );
    let mut tar = tar::Builder::new(Vec::new());
    let mut add = |name: &str, content: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, content).unwrap();
    };
    add("aaaa/VERSION", b"1.0");
    add("aaaa/json", b"{}");
    add("aaaa/layer.tar", &lower);
    add("bbbb/layer.tar", &upper);
    let list = json!([{"Config": "c0ffee.json", "RepoTags": names,
        "Layers": ["aaaa/layer.tar", "bbbb/layer.tar", "cccc/layer.tar"]}]);
    add("c0ffee.json", &config);
    add("manifest.json", list.to_string().as_bytes());
    add("repositories", b"{}");
    // A duplicate layer is a symlink.
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    tar.append_link(&mut header, "cccc/layer.tar", "../bbbb/layer.tar")
        .unwrap();
    tar.into_inner().unwrap()
}

/// An OCI layout; `docker` adds the `manifest.json` that `docker save` writes since version 25.
fn layout(
    image: &TestImage,
    annotation: (&str, &str),
    docker: Option<&str>,
) -> Vec<(String, Vec<u8>)> {
    let blob = |bytes: &Vec<u8>| {
        (
            format!("blobs/sha256/{}", Digest::of(bytes).hex()),
            bytes.clone(),
        )
    };
    let mut files: Vec<_> = image.blobs().chain([&image.manifest]).map(blob).collect();
    let mut entry = descriptor(&image.manifest, image.media_type);
    entry["annotations"] = json!({annotation.0: annotation.1});
    files.push((
        "index.json".into(),
        json!({"schemaVersion": 2, "manifests": [entry]})
            .to_string()
            .into(),
    ));
    files.push((
        "oci-layout".into(),
        br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec(),
    ));
    if let Some(name) = docker {
        let list = json!([{"Config": blob(&image.config).0, "RepoTags": [name],
            "Layers": image.layers.iter().map(|l| blob(l).0).collect::<Vec<_>>()}]);
        files.push(("manifest.json".into(), list.to_string().into()));
    }
    files
}

fn names(loaded: &[LoadedImage]) -> Vec<String> {
    let name = |l: &LoadedImage| l.reference.as_ref().map_or("-".into(), ToString::to_string);
    loaded.iter().map(name).collect()
}

#[tokio::test]
async fn old_docker_archives_load() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let node = TestNode::new();
        let archive = pack(&old_docker(&["app:1", "registry.example/app:2"]), packing);
        let loaded = load(&node.store, &archive[..], None).unwrap();
        assert_eq!(
            names(&loaded),
            ["docker.io/library/app:1", "registry.example/app:2"]
        );
        let image = run(&node, "app:1").await;
        assert!(image.id.starts_with("docker.io/library/app@sha256:"));
        assert_eq!(image.layers.len(), 2, "one of three appears twice");
        assert_eq!(fs::read(image.layers[0].join("bin/app")).unwrap(), b"one");
        // The blobs are compressed, and there are no leftovers.
        assert_eq!(node.blobs().len(), 4);
        assert_eq!(
            fs::read_dir(node.store.path().join("partial"))
                .unwrap()
                .count(),
            0
        );
    }
}

#[tokio::test]
async fn new_docker_archives_keep_their_digests() {
    let image = TestImage::usual(OCI);
    let name = ("org.opencontainers.image.ref.name", "1");
    let full = ("io.containerd.image.name", "docker.io/library/app:1");
    for (files, given) in [
        (layout(&image, name, Some("app:1")), None),
        (layout(&image, full, None), None),
        (
            layout(&image, ("org.opencontainers.image.ref.name", "app:1"), None),
            None,
        ),
        (layout(&image, name, None), Some("app:1".parse().unwrap())),
    ] {
        let node = TestNode::new();
        let loaded = load(&node.store, &tar_of(&files)[..], given.as_ref()).unwrap();
        assert_eq!(names(&loaded), ["docker.io/library/app:1"]);
        assert_eq!(loaded[0].digest, image.digest());
        let found = run(&node, "app:1").await;
        assert_eq!(
            found.id,
            format!("docker.io/library/app@{}", image.digest())
        );
        // The same layout as a directory.
        let dir = node.dir.path().join("layout");
        for (name, content) in &files {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let node = TestNode::new();
        let again = load_directory(&node.store, &dir, given.as_ref()).unwrap();
        assert_eq!(again, loaded);
    }
    // Without a name it is garbage.
    let node = TestNode::new();
    let loaded = load(&node.store, &tar_of(&layout(&image, name, None))[..], None).unwrap();
    assert_eq!(names(&loaded), ["-"]);
    node.store.prune(&PruneOptions::default()).await.unwrap();
    assert!(node.blobs().is_empty());
}

#[tokio::test]
async fn saved_archives_load() {
    let node = TestNode::new();
    load(&node.store, &old_docker(&["app:1", "app:2"])[..], None).unwrap();
    let image = run(&node, "app:1").await;
    let all = ["app:1".parse().unwrap(), "app:2".parse().unwrap()];
    for format in [
        ArchiveFormat::Docker,
        ArchiveFormat::Oci,
        ArchiveFormat::OciDirectory,
    ] {
        let (mut out, dir) = (Vec::new(), node.dir.path().join("saved"));
        save(&node.store, &all, format, &mut out, &dir).unwrap();
        let other = TestNode::new();
        let loaded = match format {
            ArchiveFormat::OciDirectory => load_directory(&other.store, &dir, None).unwrap(),
            _ => load(&other.store, &out[..], None).unwrap(),
        };
        assert!(
            names(&loaded).contains(&"docker.io/library/app:2".to_owned()),
            "{format:?}"
        );
        assert_eq!(run(&other, "app:2").await.id, image.id, "{format:?}");
        let mut again = Vec::new();
        save(&node.store, &all, format, &mut again, &dir).unwrap();
        assert!(again == out, "the same image gives the same archive");
    }
    let error = save(
        &node.store,
        &["no:1".parse().unwrap()],
        ArchiveFormat::Oci,
        std::io::sink(),
        Path::new("x"),
    );
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("there is no image docker.io/library/no:1")
    );
}

#[test]
fn invalid_archives_are_rejected() {
    let image = TestImage::usual(OCI);
    let full = ("io.containerd.image.name", "app:1");
    let whole = layout(&image, full, None);
    let without = |part: &str| -> Vec<_> {
        whole
            .iter()
            .filter(|(name, _)| !name.contains(part))
            .cloned()
            .collect()
    };
    let mut changed = whole.clone();
    changed[2].1[5000] ^= 1;
    let missing = Digest::of(&image.layers[0]).hex();
    let mut tar = tar_of(&whole);
    let not_tar = "not a tar archive";
    let text = b"Just words, more of them than the header of a tar archive has bytes. ".repeat(20);
    for (archive, expected_text) in [
        (b"<html>".to_vec(), not_tar),
        (text.clone(), not_tar),
        (pack(&text, Packing::Gzip), not_tar),
        (pack(b"<html>", Packing::Zstd), not_tar),
        (
            pack(b"", Packing::Gzip),
            "neither from `docker save` nor an OCI image layout",
        ),
        (
            tar_of(&without("index.json")),
            "neither from `docker save` nor an OCI image layout",
        ),
        (tar_of(&without(&missing)), "is missing"),
        (tar_of(&changed), "damaged"),
        (
            tar_of(&[("index.json".into(), b"[]".to_vec())]),
            "index.json",
        ),
        (
            tar_of(&[(
                "manifest.json".into(),
                br#"[{"Config":"../../etc/passwd"}]"#.to_vec(),
            )]),
            "etc/passwd is missing",
        ),
        (tar.drain(..tar.len() / 2).collect(), "cannot read"),
    ] {
        let node = TestNode::new();
        let error = load(&node.store, &archive[..], None).unwrap_err();
        let text = images::error_chain(&error);
        assert!(text.contains(expected_text), "{expected_text}: {text}");
        assert!(node.store.list().unwrap().is_empty());
        assert_eq!(
            fs::read_dir(node.store.path().join("partial"))
                .unwrap()
                .count(),
            0
        );
    }
}

#[test]
fn decompression_bombs_are_rejected() {
    let limits = ImageLimits {
        bytes: 1 << 20,
        ..ImageLimits::default()
    };
    let image = TestImage::usual(OCI);
    let mut files = layout(&image, ("io.containerd.image.name", "app:1"), None);
    let node = TestNode::new();
    let whole = pack(&tar_of(&files), Packing::Gzip);
    images::archive::load(&node.store, &whole[..], None, limits).unwrap();
    // Before, between and after the files of the image.
    for at in [0, 2, files.len()] {
        let node = TestNode::new();
        files.insert(at, ("zeros".to_owned(), vec![0; 4 << 20]));
        let bomb = pack(&tar_of(&files), Packing::Gzip);
        assert!(bomb.len() < 100_000);
        let error = images::archive::load(&node.store, &bomb[..], None, limits).unwrap_err();
        let message = images::error_chain(&error);
        assert!(message.contains("more than 1048576 bytes"), "{message}");
        assert!(node.store.list().unwrap().is_empty());
        files.remove(at);
    }
}

/// A reader that records the largest number of open descriptors.
struct DescriptorCounter<'a> {
    archive: &'a [u8],
    most: usize,
}

impl Read for DescriptorCounter<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.most = self.most.max(fs::read_dir("/proc/self/fd")?.count());
        self.archive.read(buffer)
    }
}

#[test]
fn load_needs_few_descriptors() {
    let full = ("io.containerd.image.name", "app:1");
    let mut files = layout(&TestImage::usual(OCI), full, None);
    files.extend((0..2000).map(|at| (format!("other/{at}"), vec![0; 2000])));
    let archive = tar_of(&files);
    let mut counter = DescriptorCounter {
        archive: &archive,
        most: 0,
    };
    let node = TestNode::new();
    let limits = ImageLimits::default();
    images::archive::load(&node.store, &mut counter, None, limits).unwrap();
    // Other tests may run in this process.
    assert!(counter.most < 500, "{}", counter.most);
    assert_eq!(listed(&node), ["app:1"]);
}

#[tokio::test]
async fn load_removes_leftovers_of_killed_load() {
    let node = TestNode::new();
    let partial = |name: &str| node.store.path().join("partial").join(name);
    for name in [".new-left", "download"] {
        fs::write(partial(name), "x").unwrap();
    }
    let archive = old_docker(&["app:1"]);
    // The file may belong to a concurrent pull.
    let pulling = node.store.lock_shared().await.unwrap();
    load(&node.store, &archive, None).unwrap();
    assert!(partial(".new-left").exists());
    drop(pulling);
    load(&node.store, &archive, None).unwrap();
    assert!(!partial(".new-left").exists() && partial("download").exists());
}

#[test]
fn one_name_needs_one_image() {
    let full = ("io.containerd.image.name", "app:1");
    let files = layout(&TestImage::usual(OCI), full, None);
    let name: Reference = "team/app:1".parse().unwrap();
    let with_entries = |entries: usize| {
        let mut files = files.clone();
        for (_, index) in files.iter_mut().filter(|(name, _)| name == "index.json") {
            let mut parsed: serde_json::Value = serde_json::from_slice(index).unwrap();
            let entry = parsed["manifests"][0].clone();
            parsed["manifests"] = vec![entry; entries].into();
            *index = parsed.to_string().into();
        }
        load(&TestNode::new().store, &tar_of(&files), Some(&name))
    };
    // Duplicate entries are one image.
    assert_eq!(names(&with_entries(2).unwrap()), ["docker.io/team/app:1"]);
    let error = with_entries(0).unwrap_err();
    assert!(error.to_string().contains("it has no image"), "{error}");

    // Two images in one archive.
    let other = TestImage::new(&[(layer(&[("other", b"")]), Packing::Plain)], OCI);
    let node = TestNode::new();
    load(&node.store, &tar_of(&files), None).unwrap();
    let full = ("io.containerd.image.name", "other:1");
    load(&node.store, &tar_of(&layout(&other, full, None)), None).unwrap();
    let mut two = Vec::new();
    let both = ["app:1".parse().unwrap(), "other:1".parse().unwrap()];
    save(
        &node.store,
        &both,
        ArchiveFormat::Docker,
        &mut two,
        Path::new("x"),
    )
    .unwrap();
    let error = load(&TestNode::new().store, &two, Some(&name)).unwrap_err();
    assert!(error.to_string().contains("2 images"), "{error}");
    // A failed save writes no archive.
    let mut none = Vec::new();
    let absent = ["absent:1".parse().unwrap()];
    save(
        &node.store,
        &absent,
        ArchiveFormat::Oci,
        &mut none,
        Path::new("x"),
    )
    .unwrap_err();
    assert!(none.is_empty());
}

#[tokio::test]
async fn removing_a_digest_removes_all_names() {
    let node = TestNode::new();
    load(
        &node.store,
        &old_docker(&["app:1", "app:2", "other:1"]),
        None,
    )
    .unwrap();
    let digest = node.store.list().unwrap()[0].digest;
    let unknown = format!("app@{}", Digest::of(b"something else"));
    let forget = |name: &str| {
        let gone = node.store.remove(&name.parse().unwrap()).unwrap();
        let mut gone: Vec<_> = gone.iter().map(ToString::to_string).collect();
        gone.sort();
        gone
    };
    assert_eq!(forget(&unknown), [""; 0]);
    assert_eq!(
        forget(&format!("app@{digest}")),
        ["docker.io/library/app:1", "docker.io/library/app:2"]
    );
    assert_eq!(listed(&node), ["other:1"]);
}

/// Loads an image with a layer of about `size` bytes, last used `used` ago.
fn stored(node: &TestNode, name: &str, size: usize, shared: bool, used: Duration) {
    let mut state = name.len() as u32 + name.as_bytes()[0] as u32;
    let mut noise = vec![0u8; size];
    noise.iter_mut().for_each(|byte| {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        *byte = (state >> 24) as u8;
    });
    let mut layers = vec![(layer(&[(name, &noise)]), Packing::Plain)];
    if shared {
        layers.push((layer(&[("shared", &vec![1; 500_000])]), Packing::Plain));
    }
    let files = layout(
        &TestImage::new(&layers, OCI),
        ("io.containerd.image.name", name),
        None,
    );
    load(&node.store, &tar_of(&files)[..], None).unwrap();
    for entry in fs::read_dir(node.store.path().join("references"))
        .unwrap()
        .flatten()
    {
        if fs::read_to_string(entry.path())
            .unwrap()
            .contains(&format!("/{name}:"))
        {
            let file = fs::File::options().append(true).open(entry.path()).unwrap();
            file.set_modified(SystemTime::now() - used).unwrap();
        }
    }
}

fn listed(node: &TestNode) -> Vec<String> {
    let all = node.store.list().unwrap();
    assert!(all.iter().all(|image| image.complete));
    let short = |name: &str| name.trim_start_matches("docker.io/library/").to_owned();
    all.iter().map(|image| short(&image.reference)).collect()
}

#[tokio::test]
async fn prune_removes_by_age_and_size() {
    let node = TestNode::new();
    let days = |n: u64| Duration::from_secs(n * 24 * 3600);
    stored(&node, "new", 100_000, true, days(0));
    stored(&node, "older", 100_000, true, days(10));
    stored(&node, "huge", 3_000_000, false, days(1));
    stored(&node, "old", 100_000, false, days(40));
    assert_eq!(
        listed(&node),
        ["huge:latest", "new:latest", "old:latest", "older:latest"]
    );
    // Nothing to remove.
    assert_eq!(
        node.store.prune(&PruneOptions::default()).await.unwrap(),
        Default::default()
    );
    let prune = PruneOptions {
        older_than: Some(days(30)),
        dry_run: true,
        ..PruneOptions::default()
    };
    let would = node.store.prune(&prune).await.unwrap();
    assert_eq!(would.references, ["docker.io/library/old:latest"]);
    assert_eq!(listed(&node).len(), 4);
    let prune = PruneOptions {
        dry_run: false,
        ..prune
    };
    assert_eq!(node.store.prune(&prune).await.unwrap(), would);
    assert_eq!(listed(&node), ["huge:latest", "new:latest", "older:latest"]);
    // A shared layer counts once, so both images stay.
    let prune = PruneOptions {
        keep_bytes: Some(800_000),
        ..PruneOptions::default()
    };
    let gone = node.store.prune(&prune).await.unwrap();
    assert!(gone.bytes > 3_000_000);
    assert_eq!(listed(&node), ["new:latest", "older:latest"]);
    // After a removal by name the other image's blobs stay.
    let forget = || node.store.remove(&"new".parse().unwrap()).unwrap();
    assert_eq!(forget().len(), 1);
    assert!(forget().is_empty());
    node.store.prune(&PruneOptions::default()).await.unwrap();
    assert_eq!(listed(&node), ["older:latest"]);
    assert_eq!(run(&node, "older").await.layers.len(), 2);
}

#[tokio::test]
async fn prune_waits_for_running_pulls() {
    let node = TestNode::new();
    let guard = node.store.lock_shared().await.unwrap();
    // A pull has downloaded a blob, but its image is not complete yet.
    node.store.put(b"half of an image").unwrap();
    let store = node.store.clone();
    let prune = tokio::spawn(async move { store.prune(&PruneOptions::default()).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!prune.is_finished());
    assert_eq!(node.blobs().len(), 1);
    drop(guard);
    assert_eq!(prune.await.unwrap().blobs, 1);
    // Leftovers of a killed pull are removed too.
    let mut left = fs::File::create(node.store.path().join("partial/leftover")).unwrap();
    left.write_all(b"x").unwrap();
    assert_eq!(
        node.store
            .prune(&PruneOptions::default())
            .await
            .unwrap()
            .bytes,
        1
    );
}

#[tokio::test]
async fn time_of_last_use_is_recorded() {
    let node = TestNode::new();
    stored(&node, "app", 1000, false, Duration::from_secs(100_000));
    let used = |node: &TestNode| node.store.list().unwrap()[0].used;
    let before = used(&node);
    run(&node, "app").await;
    assert!(used(&node) > before + 90_000);
}
