//! Mounts unpacked layers with the kernel's overlayfs, in user namespaces like those of pods.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use common::*;
use images::archive::load;
use images::{Digest, ImageLimits, NoProgress, PullPolicy, RegistryConfig, ensure};
use serde_json::json;

/// The namespaces' id mappings.
const NAMESPACES: [(&str, &str); 2] = [("one id", "0 0 1"), ("a range", "0 0 65536")];

#[test]
fn overlayfs_sees_whiteouts_and_owners() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("only root can map a range without newuidmap: nothing was tested");
        return;
    }
    for (name, map) in NAMESPACES {
        // The child waits for its id mappings, then becomes root of the namespace by exec.
        let mut child = Command::new("unshare")
            .args([
                "--user",
                "--mount",
                "sh",
                "-c",
                "echo ready; read -r go; exec \"$@\"",
                "sh",
            ])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "inside_a_namespace", "--ignored", "--nocapture"])
            .env("TEST_NAMESPACE", name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut ready)
            .unwrap();
        fs::write(format!("/proc/{}/uid_map", child.id()), map).unwrap();
        fs::write(format!("/proc/{}/gid_map", child.id()), map).unwrap();
        child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        let output = child.wait_with_output().unwrap();
        let output_text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && output_text.contains("1 passed"),
            "{name}: {output_text}"
        );
    }
}

/// An archive of an image with two layers, whiteouts and owners.
fn image() -> Vec<u8> {
    let bottom = entries(&[
        ("etc/gone", 0, 0o644, b"x"),
        ("etc/stays", 0, 0o644, b"x"),
        ("dir/below", 0, 0o644, b"x"),
        ("opaque/below", 0, 0o644, b"x"),
        ("tree/a/b", 0, 0o644, b"x"),
        ("bin/su", 33, 0o4755, b"su"),
    ]);
    let top = entries(&[
        ("etc/.wh.gone", 0, 0o644, b""),
        ("opaque/.wh..wh..opq", 0, 0o644, b""),
        ("opaque/above", 0, 0o644, b"x"),
        (".wh.tree", 0, 0o644, b""),
        ("tree/new", 0, 0o644, b"x"),
        ("dir/above", 0, 0o000, b"x"),
    ]);
    let config = config(
        &[Digest::of(&bottom), Digest::of(&top)],
        images::architecture(),
    );
    let list = json!([{"Config": "c.json", "RepoTags": ["app:1"], "Layers": ["a.tar", "b.tar"]}]);
    let list = list.to_string();
    layer(&[
        ("c.json", &config),
        ("a.tar", &bottom),
        ("b.tar", &top),
        ("manifest.json", list.as_bytes()),
    ])
}

fn entries(files: &[(&str, u64, u32, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, owner, mode, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(*mode);
        header.set_uid(*owner);
        header.set_gid(*owner);
        tar.append_data(&mut header, name, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

#[tokio::test]
#[ignore = "run by overlayfs_sees_whiteouts_and_owners, in a new namespace"]
async fn inside_a_namespace() {
    let Ok(namespace) = std::env::var("TEST_NAMESPACE") else {
        return;
    };
    let node = TestNode::new();
    load(&node.store, &image()[..], None, ImageLimits::default()).unwrap();
    let request = request("app:1", PullPolicy::Never);
    let config = RegistryConfig::default();
    let image = ensure(&node.store, &node.layers, &request, &config, &NoProgress)
        .await
        .unwrap();
    let merged = node.dir.path().join("merged");
    fs::create_dir(&merged).unwrap();
    let stack: Vec<_> = image
        .layers
        .iter()
        .rev()
        .map(|l| l.display().to_string())
        .collect();
    let mounted = Command::new("mount")
        .args(["-t", "overlay", "overlay", "-o", "userxattr,ro"])
        .arg("-o")
        .arg(format!("lowerdir={}", stack.join(":")))
        .arg(&merged)
        .status()
        .unwrap();
    assert!(mounted.success());
    assert_eq!(names(&merged), ["bin", "dir", "etc", "opaque", "tree"]);
    assert_eq!(names(&merged.join("etc")), ["stays"]);
    assert_eq!(names(&merged.join("opaque")), ["above"]);
    assert_eq!(names(&merged.join("tree")), ["new"]);
    assert_eq!(names(&merged.join("dir")), ["above", "below"]);
    let su = fs::metadata(merged.join("bin/su")).unwrap();
    assert_eq!(su.mode() & 0o7777, 0o4755);
    let owner = if namespace == "a range" { 33 } else { 0 };
    assert_eq!((su.uid(), su.gid()), (owner, owner));
    // The namespace's root can read files without permissions, as containers expect.
    assert_eq!(fs::read(merged.join("dir/above")).unwrap(), b"x");
    assert!(
        Command::new("umount")
            .arg(&merged)
            .status()
            .unwrap()
            .success()
    );
    let layers = node.layers.path().to_path_buf();
    node.layers.clone().remove_all().unwrap();
    assert!(!layers.exists());
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
