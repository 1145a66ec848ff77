use std::os::unix::fs::MetadataExt;

use super::*;

fn payload(files: &[(&str, &str, u32)]) -> Payload {
    let file = |(path, data, mode): &(&str, &str, u32)| {
        let content = FileContent {
            data: data.as_bytes().to_vec(),
            mode: *mode,
            user: None,
        };
        ((*path).to_owned(), content)
    };
    Payload {
        files: files.iter().map(file).collect(),
        ..Default::default()
    }
}

fn write_files(dir: &Path, files: &[(&str, &str, u32)]) {
    write(dir, &payload(files), |_| Ok(())).unwrap();
}

/// All files in the directory, with VERSION for the name of the current version.
fn listing(dir: &Path) -> String {
    let version = fs::read_link(dir.join(DATA)).unwrap();
    let mut lines = Vec::new();
    collect(dir, dir, &mut lines);
    for line in &mut lines {
        *line = line.replace(version.to_str().unwrap(), "VERSION");
    }
    lines.sort();
    lines.join("\n")
}

fn collect(root: &Path, dir: &Path, lines: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let status = path.symlink_metadata().unwrap();
        if status.is_symlink() {
            let target = fs::read_link(&path).unwrap();
            lines.push(format!("{name} -> {}", target.display()));
        } else if status.is_dir() {
            lines.push(format!("{name}/ {:o}", status.mode() & 0o7777));
            collect(root, &path, lines);
        } else {
            let data = fs::read_to_string(&path).unwrap();
            lines.push(format!("{name} {:o} {data}", status.mode() & 0o7777));
        }
    }
}

#[test]
fn layout_matches_upstreams_atomic_writer() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[
            ("a", "1", 0o644),
            ("d/e/f", "2", 0o400),
            ("d/g", "3", 0o777),
        ],
    );
    insta::assert_snapshot!(listing(dir.path()));
}

#[test]
fn update_switches_version_and_removes_old_names() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[("a", "1", 0o644), ("d/x", "2", 0o644), ("old", "3", 0o644)],
    );
    let before = fs::read_link(dir.path().join(DATA)).unwrap();
    write_files(
        dir.path(),
        &[
            ("a", "changed", 0o644),
            ("d/y", "2", 0o644),
            ("new", "4", 0o600),
        ],
    );
    assert_ne!(fs::read_link(dir.path().join(DATA)).unwrap(), before);
    insta::assert_snapshot!(listing(dir.path()));
}

#[test]
fn unchanged_payload_only_restores_missing_names() {
    let dir = tempfile::tempdir().unwrap();
    let files = [("a", "1", 0o644), ("b", "2", 0o644)];
    write_files(dir.path(), &files);
    let before = listing(dir.path());
    let version = fs::read_link(dir.path().join(DATA)).unwrap();
    fs::remove_file(dir.path().join("a")).unwrap();
    write_files(dir.path(), &files);
    assert_eq!(listing(dir.path()), before);
    assert_eq!(fs::read_link(dir.path().join(DATA)).unwrap(), version);
}

#[test]
fn payload_may_be_empty() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[]);
    assert_eq!(listing(dir.path()), "..data -> VERSION\nVERSION/ 755");
    write_files(dir.path(), &[("a", "1", 0o644)]);
    write_files(dir.path(), &[]);
    assert_eq!(listing(dir.path()), "..data -> VERSION\nVERSION/ 755");
}

#[test]
fn file_may_become_directory_and_back() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a", "1", 0o644)]);
    write_files(dir.path(), &[("a/b", "2", 0o644)]);
    assert_eq!(fs::read_to_string(dir.path().join("a/b")).unwrap(), "2");
    write_files(dir.path(), &[("a", "3", 0o644)]);
    assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "3");
}

#[test]
fn leftovers_of_killed_writer_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("..nowhere", dir.path().join(NEW_DATA)).unwrap();
    fs::create_dir_all(dir.path().join("..2026_01_01_00_00_00.1/d")).unwrap();
    write_files(dir.path(), &[("a", "1", 0o644)]);
    assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "1");
    assert!(!dir.path().join(NEW_DATA).is_symlink());
    assert!(!dir.path().join("..2026_01_01_00_00_00.1").exists());
    // `..data` refers to a missing version.
    fs::remove_dir_all(
        dir.path()
            .join(fs::read_link(dir.path().join(DATA)).unwrap()),
    )
    .unwrap();
    write_files(dir.path(), &[("a", "2", 0o644)]);
    assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "2");
}

#[test]
fn invalid_paths_leave_the_volume_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a", "1", 0o644)]);
    let before = listing(dir.path());
    for bad in ["../x", "/x", "..data", "a/../../x"] {
        write(dir.path(), &payload(&[(bad, "", 0o644)]), |_| Ok(())).unwrap_err();
    }
    assert_eq!(listing(dir.path()), before);
}

#[test]
fn mount_points_are_created() {
    let dir = tempfile::tempdir().unwrap();
    let mut payload = payload(&[("a", "1", 0o644)]);
    payload.mount_points.insert("nested/deep".to_owned());
    write(dir.path(), &payload, |_| Ok(())).unwrap();
    assert!(dir.path().join("nested/deep").is_dir());
}
