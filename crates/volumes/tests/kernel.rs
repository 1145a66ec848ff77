//! Volumes on a real kernel, in a private mount namespace.
//!
//! Each test runs itself again under `unshare`: with a single mapped id, as on nodes without subordinate ids, and, if the
//! caller is root, with all ids.

#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap fails the test and shows the line"
)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use volumes::{FileContent, FsGroupPolicy, Payload, PodVolumes, VolumeSource};

const INSIDE: &str = "CORACLE_TEST_INSIDE";

/// Runs the test `name` again in new namespaces. Returns true within them.
fn inside(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let run = |arguments: &[&str], ids: &str| {
        let status = Command::new("unshare")
            .args(arguments)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(INSIDE, ids)
            .status()
            .expect("unshare, of util-linux");
        assert!(status.success(), "{name} with {ids}");
    };
    run(&["--user", "--map-root-user", "--mount"], "one id");
    if rustix::process::geteuid().is_root() {
        run(&["--mount"], "all ids");
    }
    false
}

fn all_ids() -> bool {
    std::env::var(INSIDE).is_ok_and(|ids| ids == "all ids")
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn group(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().gid()
}

fn files(entries: &[(&str, u32)]) -> VolumeSource {
    let file = |(name, mode): &(&str, u32)| {
        let content = FileContent {
            data: b"x".to_vec(),
            mode: *mode,
            user: Some(1234),
        };
        ((*name).to_owned(), content)
    };
    VolumeSource::Files(Payload {
        files: entries.iter().map(file).collect(),
        ..Default::default()
    })
}

#[test]
fn memory_empty_dir_is_a_limited_tmpfs() {
    if !inside("memory_empty_dir_is_a_limited_tmpfs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (disk, memory) = (dir.path().join("disk"), dir.path().join("memory"));
    let volumes = PodVolumes::new(&disk, &memory);
    let source = VolumeSource::EmptyDir {
        memory: true,
        size_limit: Some(1 << 20),
    };
    let prepared = volumes.prepare("cache", &source, Some(2000)).unwrap();
    assert_eq!(prepared.path, memory.join("cache"));
    assert!(!prepared.read_only);
    assert_eq!(mode(&prepared.path), 0o3777);
    assert_eq!(group(&prepared.path), if all_ids() { 2000 } else { 0 });

    let file = prepared.path.join("file");
    fs::write(&file, vec![1; 512 << 10]).unwrap();
    assert_eq!(volumes.usage("cache"), 512 << 10);
    fs::write(prepared.path.join("more"), vec![1; 1 << 20]).unwrap_err();
    // A second call, as after a restart, keeps the content.
    volumes.prepare("cache", &source, Some(2000)).unwrap();
    assert!(file.exists());

    volumes.remove_all().unwrap();
    assert!(!disk.exists() && !memory.exists());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(dir.path().to_str().unwrap()));
    volumes.remove_all().unwrap();
}

#[test]
fn disk_empty_dir_is_writable_and_measured() {
    if !inside("disk_empty_dir_is_writable_and_measured") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let volumes = PodVolumes::new(dir.path().join("disk"), dir.path().join("memory"));
    let source = VolumeSource::EmptyDir {
        memory: false,
        size_limit: Some(1),
    };
    let plain = volumes.prepare("plain", &source, None).unwrap().path;
    assert_eq!(mode(&plain), 0o777);
    assert_eq!(mode(plain.parent().unwrap()), 0o700);
    let shared = volumes.prepare("shared", &source, Some(2000)).unwrap().path;
    assert_eq!(mode(&shared), 0o2777);

    fs::create_dir_all(plain.join("a/b")).unwrap();
    fs::write(plain.join("a/b/big"), vec![1; 1 << 20]).unwrap();
    fs::hard_link(plain.join("a/b/big"), plain.join("twice")).unwrap();
    std::os::unix::fs::symlink("/usr", plain.join("out")).unwrap();
    fs::write(plain.join("sealed"), vec![1; 1 << 20]).unwrap();
    fs::set_permissions(plain.join("a"), fs::Permissions::from_mode(0o0)).unwrap();
    let usage = volumes.usage("plain");
    assert!((2 << 20..3 << 20).contains(&usage), "{usage}");
    assert_eq!(volumes.usage("none"), 0);
    volumes.remove_all().unwrap();
    assert!(!plain.exists());
}

#[test]
fn files_have_fs_group_and_user() {
    if !inside("files_have_fs_group_and_user") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let volumes = PodVolumes::new(dir.path().join("disk"), dir.path().join("memory"));
    let prepared = volumes
        .prepare("v", &files(&[("token", 0o600), ("d/x", 0o400)]), Some(2000))
        .unwrap();
    assert!(prepared.read_only);
    assert!(prepared.path.starts_with(dir.path().join("memory")));
    let real = |name: &str| prepared.path.join(name).canonicalize().unwrap();
    assert_eq!(mode(&real("token")), 0o640);
    assert_eq!(mode(&real("d/x")), 0o440);
    assert_eq!(mode(&real("d")), 0o2755);
    assert_eq!(mode(&prepared.path), 0o2777);
    let owner = fs::metadata(real("token")).unwrap();
    let expected = if all_ids() { (1234, 2000) } else { (0, 0) };
    assert_eq!((owner.uid(), owner.gid()), expected);

    volumes
        .update("v", &files(&[("token", 0o600)]), Some(2000))
        .unwrap();
    assert_eq!(mode(&real("token")), 0o640);
    assert!(!prepared.path.join("d").is_symlink());
    volumes.remove_all().unwrap();
    assert!(!prepared.path.exists());
}

#[test]
fn fs_group_change_policy_is_followed() {
    if !inside("fs_group_change_policy_is_followed") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let volumes = PodVolumes::new(dir.path().join("disk"), dir.path().join("memory"));
    let path = dir.path().join("data");
    let outside = dir.path().join("outside");
    fs::write(&outside, "x").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o600)).unwrap();
    let source = |ownership| VolumeSource::Directory {
        path: path.clone(),
        read_only: false,
        ownership,
        create: false,
    };
    let missing = volumes
        .prepare("v", &source(FsGroupPolicy::Keep), None)
        .unwrap_err();
    assert!(missing.to_string().contains("does not exist"), "{missing}");

    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(path.join("file"), "x").unwrap();
    fs::set_permissions(path.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&outside, path.join("link")).unwrap();
    volumes
        .prepare("v", &source(FsGroupPolicy::Keep), Some(2000))
        .unwrap();
    assert_eq!(mode(&path.join("file")), 0o600);
    volumes
        .prepare("v", &source(FsGroupPolicy::Always), Some(2000))
        .unwrap();
    assert_eq!(mode(&path.join("file")), 0o660);
    assert_eq!(mode(&path), 0o2770);
    // Symlinks are not followed.
    assert_eq!(mode(&outside), 0o600);
    assert_eq!(group(&outside), 0);

    fs::set_permissions(path.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    volumes
        .prepare("v", &source(FsGroupPolicy::OnRootMismatch), Some(2000))
        .unwrap();
    let skipped = all_ids();
    assert_eq!(
        mode(&path.join("file")),
        if skipped { 0o600 } else { 0o660 }
    );
    volumes.remove_all().unwrap();
    assert!(path.join("file").exists());

    let scratch = VolumeSource::Directory {
        path: dir.path().join("scratch/0123"),
        read_only: false,
        ownership: FsGroupPolicy::Always,
        create: true,
    };
    let made = volumes.prepare("v", &scratch, None).unwrap().path;
    assert_eq!(mode(&made), 0o777);
    assert_eq!(mode(&dir.path().join("scratch")), 0o700);
    volumes.prepare("v", &scratch, None).unwrap();
}

#[test]
fn invalid_volume_names_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = PodVolumes::new(dir.path().join("disk"), dir.path().join("memory"));
    let source = VolumeSource::EmptyDir {
        memory: false,
        size_limit: None,
    };
    for name in ["", "..", ".", "a/b", "../x"] {
        volumes.prepare(name, &source, None).unwrap_err();
    }
}

/// Bind-mounts a fake mountinfo that shows the file systems at `exports` as NFS mounts: a real mount needs a server.
fn pretend_nfs(dir: &Path, exports: &[(&Path, &str)]) {
    let table = Path::new("/proc/self/mountinfo");
    let _ = linux::mount::detach(table);
    let text = fs::read_to_string(table).unwrap();
    let lines = text.lines().map(|line| {
        let mount_point = line.split(' ').nth(4);
        let export = exports.iter().find(|(at, _)| at.to_str() == mount_point);
        match (export, line.split_once(" - ")) {
            (Some((_, source)), Some((before, _))) => format!("{before} - nfs4 {source} rw\n"),
            _ => format!("{line}\n"),
        }
    });
    let file = dir.join("mountinfo");
    fs::write(&file, lines.collect::<String>()).unwrap();
    linux::mount::bind(&file, table).unwrap();
}

#[test]
fn nfs_directories_stay_in_their_export() {
    if !inside("nfs_directories_stay_in_their_export") {
        return;
    }
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().canonicalize().unwrap();
    let export = base.join("export");
    for made in ["export", "secret", "memory"] {
        fs::create_dir(base.join(made)).unwrap();
    }
    fs::write(base.join("secret/file"), "of the node").unwrap();
    linux::tmpfs::mount(&export, None, 0o755).unwrap();
    for made in ["real/deep", "local", "other", "over"] {
        fs::create_dir_all(export.join(made)).unwrap();
    }
    fs::write(export.join("real/file"), "of the server").unwrap();
    symlink(base.join("secret"), export.join("absolute")).unwrap();
    symlink("../secret", export.join("up")).unwrap();
    symlink("real", export.join("within")).unwrap();
    // Mounts of the node below the export: one of the same server, and another file system.
    for name in ["other", "local"] {
        linux::tmpfs::mount(&export.join(name), None, 0o755).unwrap();
    }
    fs::create_dir(export.join("other/x")).unwrap();
    linux::mount::bind(&base.join("secret"), &export.join("over")).unwrap();
    let other = export.join("other");
    pretend_nfs(
        &base,
        &[(&export, "nas:/export"), (&other, "nas:/export/other")],
    );

    let volumes = PodVolumes::new(base.join("disk"), base.join("memory"));
    let prepare = |name: &str, path: &str| {
        let source = VolumeSource::Nfs {
            server: "nas".to_owned(),
            path: path.to_owned(),
            mounted_at: None,
            read_only: false,
        };
        volumes.prepare(name, &source, None)
    };
    let prepared = prepare("real", "/export/real").unwrap().path;
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    assert_eq!(text(&prepared.join("file")), "of the server");
    // The prepared mount stays when the path leads elsewhere later.
    fs::rename(export.join("real"), export.join("moved")).unwrap();
    symlink("../secret", export.join("real")).unwrap();
    assert_eq!(prepare("real", "/export/real").unwrap().path, prepared);
    assert_eq!(text(&prepared.join("file")), "of the server");
    assert!(prepare("x", "/export/other/x").unwrap().path.is_dir());

    for (path, expected) in [
        ("/export/absolute", "contains a symbolic link"),
        ("/export/up", "contains a symbolic link"),
        ("/export/up/file", "contains a symbolic link"),
        ("/export/within", "contains a symbolic link"),
        ("/export/none", "does not exist on this node"),
        ("/export/local", "is not mounted on this node"),
        ("/export/over", "is not mounted on this node"),
        ("/export", "where this node has mounted another file system"),
        ("/other", "is not mounted on this node"),
    ] {
        let error = prepare("bad", path).unwrap_err().to_string();
        assert!(error.contains(expected), "{path}: {error}");
    }
    volumes.remove_all().unwrap();
    assert_eq!(text(&export.join("moved/file")), "of the server");
}
