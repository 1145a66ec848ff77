//! Runs `coracle image load|ls|save|rm|prune`.

// Clippy's exception for tests does not apply to helpers of integration tests.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o755);
        tar.append_data(&mut header, name, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

/// An archive like those of `docker save`.
fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let layer = tar(&[("bin/app", content)]);
    let config = json!({"os": "linux", "config": {"Cmd": ["/bin/app"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", hex(&layer))]}});
    let list = json!([{"Config": "c.json", "RepoTags": [name], "Layers": ["l/layer.tar"]}]);
    tar(&[
        ("l/layer.tar", &layer),
        ("c.json", config.to_string().as_bytes()),
        ("manifest.json", list.to_string().as_bytes()),
    ])
}

/// Runs `coracle` with `home` as its home directory.
fn coracle(home: &Path, args: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_coracle"))
        .args(args)
        .env_clear()
        .env("HOME", home)
        .env("PATH", std::env::var_os("PATH").unwrap())
        .current_dir(home)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

fn stdout(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn image_is_loaded_saved_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let run = |args: &[&str]| coracle(home, args, b"");
    // From a pipe, and from a file.
    let loaded = stdout(&coracle(
        home,
        &["image", "load"],
        &archive("app:1", b"one"),
    ));
    assert!(
        loaded.starts_with("docker.io/library/app@sha256:"),
        "{loaded}"
    );
    fs::write(home.join("two.tar"), archive("team/app:2", b"two")).unwrap();
    stdout(&run(&["image", "load", "-i", "two.tar"]));
    assert!(home.join(".local/share/coracle/images/oci-layout").exists());
    let list = stdout(&run(&["image", "ls"]));
    assert!(
        list.lines()
            .nth(1)
            .unwrap()
            .starts_with("docker.io/library/app:1 "),
        "{list}"
    );
    let list: Value = serde_json::from_str(&stdout(&run(&["image", "ls", "--json"]))).unwrap();
    assert_eq!(list[1]["reference"], "docker.io/team/app:2");
    assert_eq!(list[1]["complete"], true);
    // After saving, removing and loading, the digest is the same.
    stdout(&run(&[
        "image",
        "save",
        "-o",
        "saved.tar",
        "app:1",
        "team/app:2",
    ]));
    stdout(&run(&["image", "rm", "app:1", "team/app:2"]));
    assert_eq!(stdout(&run(&["image", "ls", "--json"])).trim(), "[]");
    let reloaded = stdout(&run(&["image", "load", "-i", "saved.tar"]));
    assert!(reloaded.contains(loaded.trim()), "{reloaded}");
    let piped = run(&["image", "save", "app:1"]).stdout;
    stdout(&coracle(home, &["image", "load"], &piped));
    // Removing by digest also removes the tag, and reports it.
    let digest = loaded.trim();
    let removed = stderr(&run(&["image", "rm", digest]));
    let expected = format!("removed {digest}, and with it docker.io/library/app:1");
    assert!(removed.contains(&expected), "{removed}");
    stdout(&coracle(home, &["image", "load"], &piped));
    // Pruning by age.
    let pruned = stdout(&run(&["image", "prune", "--older-than", "0s"]));
    assert_eq!(pruned.lines().count(), 2);
    let blobs = home.join(".local/share/coracle/images/blobs/sha256");
    assert_eq!(fs::read_dir(blobs).unwrap().count(), 0);
}

#[test]
fn failures_name_the_problem() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let kept = archive("kept", b"x");
    stdout(&coracle(home, &["image", "load"], &kept));
    for (args, code, expected) in [
        (
            &["image", "rm", "nothing"][..],
            74,
            "there is no image docker.io/library/nothing:latest",
        ),
        (
            &["image", "save", "-o", "x", "nothing"],
            74,
            "there is no image",
        ),
        (
            &["image", "load", "-i", "no-such-file"],
            74,
            "can't read no-such-file",
        ),
        (&["image", "load"], 74, "the archive is empty"),
        (
            &["image", "pull", "Not/A//Name"],
            64,
            "couldn't parse image name",
        ),
        (
            &["image", "pull", "127.0.0.1:1/app"],
            74,
            "the registry is unavailable",
        ),
        (
            &["image", "prune", "--older-than", "3y"],
            64,
            "s, m, h, d or w",
        ),
        (&["image", "pull"], 64, "IMAGE"),
    ] {
        let output = coracle(home, args, b"");
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(expected),
            "{args:?}: {}",
            stderr(&output)
        );
    }
    let foreign = tar(&[("file", b"x")]);
    for (input, expected) in [
        (&b""[..], "the archive is empty"),
        (b"text", "not a tar archive"),
        (&foreign, "it has no manifest.json"),
    ] {
        let output = coracle(home, &["image", "load"], input);
        assert_eq!(output.status.code(), Some(74));
        let message = stderr(&output);
        assert!(message.contains(expected), "{message}");
        assert!(
            message.contains("hint: load an archive of `docker save`"),
            "{message}"
        );
    }
    let config = home.join(".config/coracle");
    fs::create_dir_all(&config).unwrap();
    fs::write(config.join("registries.toml"), "[registry.x]\nmirror = 1\n").unwrap();
    let output = coracle(home, &["image", "pull", "app"], b"");
    assert_eq!(output.status.code(), Some(74));
    assert!(stderr(&output).contains("registries.toml"));
}
