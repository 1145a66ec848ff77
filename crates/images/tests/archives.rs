//! Archives of Docker and OCI, loaded and saved; and what is collected afterwards.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use common::*;
use images::archive::{Format, LoadError, Loaded, load_directory, save};
use images::{
    Digest, Image, Limits, Prune, PullPolicy, Quiet, Reference, RegistryConfig, Store, ensure,
};
use serde_json::json;

fn load(store: &Store, archive: &[u8], name: Option<&Reference>) -> Result<Vec<Loaded>, LoadError> {
    images::archive::load(store, archive, name, Limits::default())
}

async fn run(place: &Place, name: &str) -> Image {
    let request = request(name, PullPolicy::Never);
    let config = RegistryConfig::default();
    ensure(&place.store, &place.layers, &request, &config, &Quiet)
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

/// What `docker save` wrote before version 25: layers in directories, the list at the end.
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
    // A layer that is the same as another is a link to it.
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    tar.append_link(&mut header, "cccc/layer.tar", "../bbbb/layer.tar")
        .unwrap();
    tar.into_inner().unwrap()
}

/// An OCI layout; `docker` adds the list that `docker save` writes since version 25.
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

fn names(loaded: &[Loaded]) -> Vec<String> {
    let name = |l: &Loaded| l.reference.as_ref().map_or("-".into(), ToString::to_string);
    loaded.iter().map(name).collect()
}

#[tokio::test]
async fn archives_of_old_dockers() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let place = Place::new();
        let archive = pack(&old_docker(&["app:1", "registry.example/app:2"]), packing);
        let loaded = load(&place.store, &archive[..], None).unwrap();
        assert_eq!(
            names(&loaded),
            ["docker.io/library/app:1", "registry.example/app:2"]
        );
        let image = run(&place, "app:1").await;
        assert!(image.id.starts_with("docker.io/library/app@sha256:"));
        assert_eq!(image.layers.len(), 2, "one of three appears twice");
        assert_eq!(fs::read(image.layers[0].join("bin/app")).unwrap(), b"one");
        // Blobs are compressed, and nothing else is left.
        assert_eq!(place.blobs().len(), 4);
        assert_eq!(
            fs::read_dir(place.store.path().join("partial"))
                .unwrap()
                .count(),
            0
        );
    }
}

#[tokio::test]
async fn archives_of_new_dockers_and_layouts_keep_their_digests() {
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
        let place = Place::new();
        let loaded = load(&place.store, &tar_of(&files)[..], given.as_ref()).unwrap();
        assert_eq!(names(&loaded), ["docker.io/library/app:1"]);
        assert_eq!(loaded[0].digest, image.digest());
        let found = run(&place, "app:1").await;
        assert_eq!(
            found.id,
            format!("docker.io/library/app@{}", image.digest())
        );
        // The same as a directory.
        let dir = place.dir.path().join("layout");
        for (name, content) in &files {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let place = Place::new();
        let again = load_directory(&place.store, &dir, given.as_ref()).unwrap();
        assert_eq!(again, loaded);
    }
    // Without any name it is only a guest.
    let place = Place::new();
    let loaded = load(&place.store, &tar_of(&layout(&image, name, None))[..], None).unwrap();
    assert_eq!(names(&loaded), ["-"]);
    place.store.prune(&Prune::default()).await.unwrap();
    assert!(place.blobs().is_empty());
}

#[tokio::test]
async fn what_is_saved_can_be_loaded() {
    let place = Place::new();
    load(&place.store, &old_docker(&["app:1", "app:2"])[..], None).unwrap();
    let image = run(&place, "app:1").await;
    let all = ["app:1".parse().unwrap(), "app:2".parse().unwrap()];
    for format in [Format::Docker, Format::Oci, Format::OciDirectory] {
        let (mut out, dir) = (Vec::new(), place.dir.path().join("saved"));
        save(&place.store, &all, format, &mut out, &dir).unwrap();
        let other = Place::new();
        let loaded = match format {
            Format::OciDirectory => load_directory(&other.store, &dir, None).unwrap(),
            _ => load(&other.store, &out[..], None).unwrap(),
        };
        assert!(
            names(&loaded).contains(&"docker.io/library/app:2".to_owned()),
            "{format:?}"
        );
        assert_eq!(run(&other, "app:2").await.id, image.id, "{format:?}");
        let mut again = Vec::new();
        save(&place.store, &all, format, &mut again, &dir).unwrap();
        assert!(again == out, "the same image gives the same archive");
    }
    let error = save(
        &place.store,
        &["no:1".parse().unwrap()],
        Format::Oci,
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
fn archives_that_are_none() {
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
    let no_archive = "this is no tar archive";
    let text = b"Just words, more of them than the header of a tar archive has bytes. ".repeat(20);
    for (archive, words) in [
        (b"<html>".to_vec(), no_archive),
        (text.clone(), no_archive),
        (pack(&text, Packing::Gzip), no_archive),
        (pack(b"<html>", Packing::Zstd), no_archive),
        (
            pack(b"", Packing::Gzip),
            "neither one of `docker save` nor an OCI image layout",
        ),
        (
            tar_of(&without("index.json")),
            "neither one of `docker save` nor an OCI image layout",
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
        (tar.drain(..tar.len() / 2).collect(), "can't be read"),
    ] {
        let place = Place::new();
        let error = load(&place.store, &archive[..], None).unwrap_err();
        let text = images::causes(&error);
        assert!(text.contains(words), "{words}: {text}");
        assert!(place.store.list().unwrap().is_empty());
        assert_eq!(
            fs::read_dir(place.store.path().join("partial"))
                .unwrap()
                .count(),
            0
        );
    }
}

#[test]
fn a_few_bytes_that_become_many_are_refused() {
    let limits = Limits {
        bytes: 1 << 20,
        ..Limits::default()
    };
    let image = TestImage::usual(OCI);
    let mut files = layout(&image, ("io.containerd.image.name", "app:1"), None);
    let place = Place::new();
    let whole = pack(&tar_of(&files), Packing::Gzip);
    images::archive::load(&place.store, &whole[..], None, limits).unwrap();
    // Before, among and after the parts of the image.
    for at in [0, 2, files.len()] {
        let place = Place::new();
        files.insert(at, ("zeros".to_owned(), vec![0; 4 << 20]));
        let bomb = pack(&tar_of(&files), Packing::Gzip);
        assert!(bomb.len() < 100_000);
        let error = images::archive::load(&place.store, &bomb[..], None, limits).unwrap_err();
        let said = images::causes(&error);
        assert!(said.contains("more than 1048576 bytes"), "{said}");
        assert!(place.store.list().unwrap().is_empty());
        files.remove(at);
    }
}

/// Counts the descriptors that are open while it is read.
struct Watching<'a> {
    archive: &'a [u8],
    most: usize,
}

impl Read for Watching<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.most = self.most.max(fs::read_dir("/proc/self/fd")?.count());
        self.archive.read(buffer)
    }
}

#[test]
fn files_of_an_archive_are_not_all_open_at_once() {
    let full = ("io.containerd.image.name", "app:1");
    let mut files = layout(&TestImage::usual(OCI), full, None);
    files.extend((0..2000).map(|at| (format!("other/{at}"), vec![0; 2000])));
    let archive = tar_of(&files);
    let mut watching = Watching {
        archive: &archive,
        most: 0,
    };
    let place = Place::new();
    let limits = Limits::default();
    images::archive::load(&place.store, &mut watching, None, limits).unwrap();
    // Other tests may run in this process.
    assert!(watching.most < 500, "{}", watching.most);
    assert_eq!(listed(&place), ["app:1"]);
}

#[tokio::test]
async fn what_a_killed_load_left_goes_with_the_next() {
    let place = Place::new();
    let partial = |name: &str| place.store.path().join("partial").join(name);
    for name in [".new-left", "download"] {
        fs::write(partial(name), "x").unwrap();
    }
    let archive = old_docker(&["app:1"]);
    // Who pulls at the same time may be writing it.
    let pulling = place.store.in_use().await.unwrap();
    load(&place.store, &archive, None).unwrap();
    assert!(partial(".new-left").exists());
    drop(pulling);
    load(&place.store, &archive, None).unwrap();
    assert!(!partial(".new-left").exists() && partial("download").exists());
}

#[test]
fn one_name_is_for_one_image() {
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
        load(&Place::new().store, &tar_of(&files), Some(&name))
    };
    // The same image twice is one.
    assert_eq!(names(&with_entries(2).unwrap()), ["docker.io/team/app:1"]);
    let error = with_entries(0).unwrap_err();
    assert!(error.to_string().contains("it has no image"), "{error}");

    // Two images in one archive.
    let other = TestImage::new(&[(layer(&[("other", b"")]), Packing::Plain)], OCI);
    let place = Place::new();
    load(&place.store, &tar_of(&files), None).unwrap();
    let full = ("io.containerd.image.name", "other:1");
    load(&place.store, &tar_of(&layout(&other, full, None)), None).unwrap();
    let mut two = Vec::new();
    let both = ["app:1".parse().unwrap(), "other:1".parse().unwrap()];
    save(
        &place.store,
        &both,
        Format::Docker,
        &mut two,
        Path::new("x"),
    )
    .unwrap();
    let error = load(&Place::new().store, &two, Some(&name)).unwrap_err();
    assert!(error.to_string().contains("2 images"), "{error}");
    // What can't be saved leaves nothing that looks like an archive.
    let mut none = Vec::new();
    let absent = ["absent:1".parse().unwrap()];
    save(
        &place.store,
        &absent,
        Format::Oci,
        &mut none,
        Path::new("x"),
    )
    .unwrap_err();
    assert!(none.is_empty());
}

#[tokio::test]
async fn removed_by_digest_under_all_of_its_names() {
    let place = Place::new();
    load(
        &place.store,
        &old_docker(&["app:1", "app:2", "other:1"]),
        None,
    )
    .unwrap();
    let digest = place.store.list().unwrap()[0].digest;
    let unknown = format!("app@{}", Digest::of(b"something else"));
    let forget = |name: &str| {
        let gone = place.store.forget(&name.parse().unwrap()).unwrap();
        let mut gone: Vec<_> = gone.iter().map(ToString::to_string).collect();
        gone.sort();
        gone
    };
    assert_eq!(forget(&unknown), [""; 0]);
    assert_eq!(
        forget(&format!("app@{digest}")),
        ["docker.io/library/app:1", "docker.io/library/app:2"]
    );
    assert_eq!(listed(&place), ["other:1"]);
}

/// An image of one layer of about `size` bytes, used so long ago.
fn stored(place: &Place, name: &str, size: usize, shared: bool, used: Duration) {
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
    load(&place.store, &tar_of(&files)[..], None).unwrap();
    for entry in fs::read_dir(place.store.path().join("references"))
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

fn listed(place: &Place) -> Vec<String> {
    let all = place.store.list().unwrap();
    assert!(all.iter().all(|image| image.complete));
    let short = |name: &str| name.trim_start_matches("docker.io/library/").to_owned();
    all.iter().map(|image| short(&image.reference)).collect()
}

#[tokio::test]
async fn pruned_by_age_and_by_size() {
    let place = Place::new();
    let days = |n: u64| Duration::from_secs(n * 24 * 3600);
    stored(&place, "new", 100_000, true, days(0));
    stored(&place, "older", 100_000, true, days(10));
    stored(&place, "huge", 3_000_000, false, days(1));
    stored(&place, "old", 100_000, false, days(40));
    assert_eq!(
        listed(&place),
        ["huge:latest", "new:latest", "old:latest", "older:latest"]
    );
    // Nothing to do.
    assert_eq!(
        place.store.prune(&Prune::default()).await.unwrap(),
        Default::default()
    );
    let prune = Prune {
        older_than: Some(days(30)),
        dry_run: true,
        ..Prune::default()
    };
    let would = place.store.prune(&prune).await.unwrap();
    assert_eq!(would.references, ["docker.io/library/old:latest"]);
    assert_eq!(listed(&place).len(), 4);
    let prune = Prune {
        dry_run: false,
        ..prune
    };
    assert_eq!(place.store.prune(&prune).await.unwrap(), would);
    assert_eq!(
        listed(&place),
        ["huge:latest", "new:latest", "older:latest"]
    );
    // A layer that is shared counts once, so both of its users may stay.
    let prune = Prune {
        keep_bytes: Some(800_000),
        ..Prune::default()
    };
    let gone = place.store.prune(&prune).await.unwrap();
    assert!(gone.bytes > 3_000_000);
    assert_eq!(listed(&place), ["new:latest", "older:latest"]);
    // Removed by name: what the other needs stays.
    let forget = || place.store.forget(&"new".parse().unwrap()).unwrap();
    assert_eq!(forget().len(), 1);
    assert!(forget().is_empty());
    place.store.prune(&Prune::default()).await.unwrap();
    assert_eq!(listed(&place), ["older:latest"]);
    assert_eq!(run(&place, "older").await.layers.len(), 2);
}

#[tokio::test]
async fn garbage_waits_for_those_who_pull() {
    let place = Place::new();
    let guard = place.store.in_use().await.unwrap();
    // Somebody has downloaded a blob whose image isn't complete yet.
    place.store.put(b"half of an image").unwrap();
    let store = place.store.clone();
    let prune = tokio::spawn(async move { store.prune(&Prune::default()).await.unwrap() });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!prune.is_finished());
    assert_eq!(place.blobs().len(), 1);
    drop(guard);
    assert_eq!(prune.await.unwrap().blobs, 1);
    // What a killed pull left goes too.
    let mut left = fs::File::create(place.store.path().join("partial/leftover")).unwrap();
    left.write_all(b"x").unwrap();
    assert_eq!(place.store.prune(&Prune::default()).await.unwrap().bytes, 1);
}

#[tokio::test]
async fn last_use_is_noted() {
    let place = Place::new();
    stored(&place, "app", 1000, false, Duration::from_secs(100_000));
    let used = |place: &Place| place.store.list().unwrap()[0].used;
    let before = used(&place);
    run(&place, "app").await;
    assert!(used(&place) > before + 90_000);
}
