//! Unpacks ordinary and hostile layers on this machine's file system.

use super::tar::testing::TarBuilder;
use super::*;
use rustix::fs::{FileType, Mode, getxattr, lgetxattr};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::sync::atomic::Ordering::Relaxed;

/// An archive unpacked into `layer` of a new directory, which also holds `outside/secret`.
struct Unpacked {
    dir: tempfile::TempDir,
    result: Result<(), String>,
}

fn unpack_with(archive: &[u8], limits: ImageLimits) -> Unpacked {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("outside")).unwrap();
    fs::write(dir.path().join("outside/secret"), "untouched").unwrap();
    let blob = dir.path().join("blob");
    fs::write(&blob, archive).unwrap();
    let layers = Layers::open(&dir.path().join("layers")).unwrap();
    let digest = Digest::of(archive);
    let result = layers.unpack(&blob, digest, digest, &UnpackBudget::new(limits));
    let result = match result {
        Ok(path) => {
            fs::rename(path, dir.path().join("layer")).unwrap();
            Ok(())
        }
        Err(error) => Err(crate::error_chain(&error)),
    };
    // Neither a change outside of the layer nor a leftover, whatever the result.
    let leftovers = fs::read_dir(layers.path()).unwrap().flatten();
    let leftovers: Vec<_> = leftovers
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| {
            let beside = [".lock-", ".use-", ".from-"];
            !beside.iter().any(|prefix| name.starts_with(prefix))
        })
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
    assert_eq!(
        fs::read(dir.path().join("outside/secret")).unwrap(),
        b"untouched"
    );
    assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 1);
    Unpacked { dir, result }
}

fn unpack(archive: TarBuilder) -> Unpacked {
    unpack_with(&archive.finish(), ImageLimits::default())
}

impl Unpacked {
    fn path(&self, name: &str) -> PathBuf {
        self.result.as_ref().unwrap();
        self.dir.path().join("layer").join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn mode(&self, name: &str) -> u32 {
        fs::symlink_metadata(self.path(name)).unwrap().mode() & 0o7777
    }

    fn is_whiteout(&self, name: &str) -> bool {
        let found = fs::symlink_metadata(self.path(name)).unwrap();
        found.file_type().is_char_device() && found.rdev() == 0
    }

    fn is_opaque(&self, name: &str) -> bool {
        let mut value = [0; 8];
        getxattr(self.path(name), "user.overlay.opaque", &mut value[..])
            .is_ok_and(|n| &value[..n] == b"y")
    }

    fn error(&self) -> &str {
        self.result.as_ref().unwrap_err()
    }
}

#[test]
fn ordinary_layer_unpacks() {
    let layer = unpack(
        TarBuilder::new()
            .directory("./", 0o755)
            .directory("bin/", 0o555)
            .file("bin/su", 0o4755, b"program")
            .symlink("sbin", "bin")
            .hard_link("bin/login", "bin/su")
            .hard_link("bin/linked", "/sbin/su")
            .fifo("pipe", 0o640)
            .directory("closed", 0o000)
            .file("closed/inside", 0o000, b"x")
            .file("made/on/the/way", 0o644, b"deep"),
    );
    assert_eq!(layer.text("bin/su"), "program");
    assert_eq!(layer.mode("bin/su"), 0o4755);
    assert_eq!(layer.mode("bin"), 0o555);
    assert_eq!(layer.mode("made/on"), 0o755);
    assert_eq!(layer.mode("closed"), 0);
    assert_eq!(layer.mode("pipe"), 0o640);
    assert!(
        fs::symlink_metadata(layer.path("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    assert_eq!(fs::read_link(layer.path("sbin")).unwrap(), Path::new("bin"));
    assert_eq!(fs::metadata(layer.path("bin/su")).unwrap().nlink(), 3);
    for name in ["bin", "bin/su", "sbin", "pipe", "closed"] {
        let found = fs::symlink_metadata(layer.path(name)).unwrap();
        assert_eq!(found.mtime(), 1_700_000_000, "{name}");
    }
}

#[test]
fn paths_out_of_the_layer_are_rejected() {
    for name in [
        "../outside/secret",
        "a/../../outside/secret",
        "/../outside/secret",
        "..",
    ] {
        let layer = unpack(TarBuilder::new().file(name, 0o644, b"evil"));
        assert!(layer.error().contains("leaves the layer"), "{name}");
    }
    // Absolute paths are relative to the layer's root.
    let layer = unpack(TarBuilder::new().file("/etc/passwd", 0o644, b"root"));
    assert_eq!(layer.text("etc/passwd"), "root");
}

#[test]
fn symlinks_resolve_within_the_layer() {
    let secret = "../../outside";
    for target in [
        secret,
        "/outside",
        "/../../../outside",
        "a/../../outside",
        "/proc/self/root/outside",
    ] {
        let layer = unpack(
            TarBuilder::new()
                .symlink("link", target)
                .file("link/secret", 0o644, b"evil")
                .directory("link/new", 0o755)
                .symlink("link/other", "x")
                .fifo("link/pipe", 0o644),
        );
        // The link is unchanged, and files written through it are in the layer.
        assert_eq!(
            fs::read_link(layer.path("link")).unwrap(),
            Path::new(target)
        );
        let inside = match target {
            "/proc/self/root/outside" => "proc/self/root/outside/secret",
            _ => "outside/secret",
        };
        assert_eq!(layer.text(inside), "evil", "{target}");
    }
    // The last component is never followed.
    let layer = unpack(
        TarBuilder::new()
            .symlink("file", "../../outside/secret")
            .file("file", 0o600, b"own"),
    );
    assert_eq!(layer.text("file"), "own");
    assert!(!layer.path("file").is_symlink());
}

#[test]
fn symlink_loops_are_rejected() {
    let layer = unpack(
        TarBuilder::new()
            .symlink("a", "b")
            .symlink("b", "a")
            .file("a/file", 0o644, b"x"),
    );
    assert!(
        layer.error().contains("cannot unpack a/file"),
        "{}",
        layer.error()
    );
}

#[test]
fn hard_links_need_a_file_of_the_layer() {
    for target in [
        "../outside/secret",
        "/outside/secret",
        "outside/secret",
        "",
        "dir",
        "gone",
        "link/secret",
    ] {
        let layer = unpack(
            TarBuilder::new()
                .directory("dir", 0o755)
                .symlink("link", "../../outside")
                .hard_link("evil", target),
        );
        assert!(
            layer.error().contains("rejected"),
            "{target}: {}",
            layer.error()
        );
    }
    // A link to a symlink, and a link to itself.
    let layer = unpack(
        TarBuilder::new()
            .symlink("link", "/etc/shadow")
            .hard_link("same", "link")
            .file("file", 0o644, b"x")
            .hard_link("file", "file"),
    );
    assert!(layer.path("same").is_symlink());
    assert_eq!(layer.text("file"), "x");
}

#[test]
fn last_entry_of_a_name_wins() {
    let layer = unpack(
        TarBuilder::new()
            .file("a", 0o644, b"first")
            .file("a", 0o600, b"second")
            .directory("b", 0o755)
            .file("b/inside", 0o644, b"x")
            .file("b", 0o644, b"was a directory")
            .symlink("c", "/etc")
            .directory("c", 0o700)
            .file("c/passwd", 0o644, b"inside")
            .directory("d", 0o700)
            .directory("d", 0o711)
            .file("e", 0o644, b"x")
            .symlink("e", "a"),
    );
    assert_eq!((layer.text("a"), layer.mode("a")), ("second".into(), 0o600));
    assert_eq!(layer.text("b"), "was a directory");
    assert_eq!(layer.text("c/passwd"), "inside");
    assert_eq!((layer.mode("c"), layer.mode("d")), (0o700, 0o711));
    assert!(layer.path("e").is_symlink());
}

#[test]
fn mode_of_replaced_directory_spares_link_target() {
    let layer = unpack(
        TarBuilder::new()
            .directory("target", 0o755)
            .directory("dir", 0o000)
            .symlink("dir", "target"),
    );
    assert_eq!(layer.mode("target"), 0o755);
}

#[test]
fn whiteouts_are_converted_for_overlayfs() {
    let layer = unpack(
        TarBuilder::new()
            .file("etc/.wh.gone", 0o644, b"")
            .file("opaque/.wh..wh..opq", 0o644, b"")
            .file("opaque/new", 0o644, b"x")
            // This layer's own entries stay, and hide lower layers.
            .file("both", 0o644, b"stays")
            .file(".wh.both", 0o644, b"")
            .file(".wh.later", 0o644, b"")
            .file("later", 0o644, b"stays too")
            .file(".wh.dir", 0o644, b"")
            .directory("dir", 0o755)
            .file(".wh.deep", 0o644, b"")
            .file("deep/er/file", 0o644, b"x")
            .directory("before", 0o755)
            .file(".wh.before", 0o644, b"")
            // Internal files of aufs.
            .file(".wh..wh.plnk/1.2", 0o644, b"x")
            .file(".wh..wh.aufs", 0o644, b"x"),
    );
    assert!(layer.is_whiteout("etc/gone"));
    assert!(layer.is_opaque("opaque") && !layer.is_opaque("etc"));
    assert_eq!(layer.text("both"), "stays");
    assert_eq!(layer.text("later"), "stays too");
    for dir in ["dir", "deep", "before"] {
        assert!(layer.is_opaque(dir), "{dir}");
    }
    assert!(!layer.is_opaque("deep/er"));
    let names = fs::read_dir(layer.path("")).unwrap().flatten();
    assert!(
        names
            .into_iter()
            .all(|e| !e.file_name().to_string_lossy().starts_with(".wh"))
    );
    for name in [".wh.", ".wh..", "a/.wh..."] {
        let layer = unpack(TarBuilder::new().file(name, 0o644, b""));
        assert!(layer.error().contains("rejected"), "{name}");
    }
}

#[test]
fn whiteouts_behind_symlinks_stay_in_the_layer() {
    let layer = unpack(
        TarBuilder::new()
            .symlink("link", "/outside")
            .file("link/.wh.secret", 0o644, b"")
            .file("link/.wh..wh..opq", 0o644, b""),
    );
    assert!(layer.is_whiteout("outside/secret"));
}

#[test]
fn devices_are_skipped() {
    let layer = unpack(
        TarBuilder::new()
            .device("dev/null", b'3', 1, 3)
            .device("dev/sda", b'4', 8, 0)
            // A forged whiteout.
            .device("etc/passwd", b'3', 0, 0)
            .file("file", 0o644, b"x"),
    );
    assert_eq!(layer.text("file"), "x");
    assert!(!layer.path("dev/null").exists());
    assert!(fs::symlink_metadata(layer.path("etc/passwd")).is_err());
}

#[test]
fn overlay_attributes_are_dropped() {
    let layer = unpack(
        TarBuilder::new()
            .pax(&[
                ("SCHILY.xattr.user.mine", b"kept"),
                ("SCHILY.xattr.user.overlay.opaque", b"y"),
                ("SCHILY.xattr.user.overlay.redirect", b"/etc"),
                ("SCHILY.xattr.user.overlay.whiteout", b"y"),
                ("SCHILY.xattr.user.fuseoverlayfs.opaque", b"y"),
                ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
                ("SCHILY.xattr.security.selinux", b"evil"),
                ("SCHILY.xattr.system.posix_acl_access", b"evil"),
            ])
            .directory("dir", 0o755)
            .pax(&[
                ("SCHILY.xattr.user.mine", b"kept"),
                ("SCHILY.xattr.trusted.x", b"y"),
            ])
            .file("file", 0o644, b"x"),
    );
    for name in ["dir", "file"] {
        let path = layer.path(name);
        let mut list = [0; 4096];
        let n = rustix::fs::listxattr(&path, &mut list[..]).unwrap();
        let list = String::from_utf8_lossy(&list[..n]).into_owned();
        assert_eq!(list, "user.mine\0", "{name}");
        let mut value = [0; 8];
        let n = lgetxattr(&path, "user.mine", &mut value[..]).unwrap();
        assert_eq!(&value[..n], b"kept");
    }
}

#[test]
fn owners_are_set_if_mapped() {
    let archive = TarBuilder::new()
        .owned_by(33, 44)
        .file("file", 0o4711, b"x")
        .symlink("link", "file")
        .directory("dir", 0o755)
        .owned_by(u64::MAX / 4, 1 << 40)
        .file("nobody", 0o644, b"x");
    let layer = unpack(archive);
    let root = rustix::process::geteuid().is_root();
    for name in ["file", "link", "dir"] {
        let found = fs::symlink_metadata(layer.path(name)).unwrap();
        let expected = if root {
            (33, 44)
        } else {
            (rustix::process::geteuid().as_raw(), found.gid())
        };
        assert_eq!((found.uid(), found.gid()), expected, "{name}");
    }
    assert_eq!(layer.mode("file"), 0o4711);
    assert_eq!(layer.text("nobody"), "x");
}

#[test]
fn long_names_of_gnu_and_pax_are_read() {
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
    let layer = unpack(
        TarBuilder::new()
            .gnu_long_name(&long)
            .file("short", 0o644, b"gnu")
            .pax(&[
                ("path", format!("pax/{long}").as_bytes()),
                ("mtime", b"1.5"),
            ])
            .file("short", 0o644, b"pax")
            .gnu_long_link(&long)
            .symlink("link", "short"),
    );
    assert_eq!(layer.text(&long), "gnu");
    assert_eq!(layer.text(&format!("pax/{long}")), "pax");
    assert_eq!(fs::read_link(layer.path("link")).unwrap(), Path::new(&long));
    let found = fs::metadata(layer.path(&format!("pax/{long}"))).unwrap();
    assert_eq!((found.mtime(), found.mtime_nsec()), (1, 500_000_000));
}

#[test]
fn oversized_headers_are_rejected() {
    let huge = "x".repeat(2 << 20);
    for archive in [
        TarBuilder::new().gnu_long_name(&huge).file("a", 0o644, b""),
        TarBuilder::new()
            .pax(&[("comment", huge.as_bytes())])
            .file("a", 0o644, b""),
        TarBuilder::new()
            .global(huge.as_bytes())
            .file("a", 0o644, b""),
    ] {
        let layer = unpack(archive);
        assert!(
            layer.error().contains("extension header has"),
            "{}",
            layer.error()
        );
    }
    let long = unpack(
        TarBuilder::new()
            .gnu_long_name(&"x/".repeat(2100))
            .file("a", 0o644, b""),
    );
    assert!(long.error().contains("too long"));
    let long = unpack(
        TarBuilder::new()
            .gnu_long_name(&"x".repeat(256))
            .file("a", 0o644, b""),
    );
    assert!(long.error().contains("too long"));
    let zero = unpack(
        TarBuilder::new()
            .pax(&[("path", b"a\0b")])
            .file("a", 0o644, b""),
    );
    assert!(zero.error().contains("NUL byte"));
}

#[test]
fn decompression_bombs_are_rejected() {
    let limits = ImageLimits {
        bytes: 1 << 20,
        entries: 100,
    };
    let zeros = vec![0; 64 << 20];
    let bomb =
        zstd::encode_all(&TarBuilder::new().file("a", 0o644, &zeros).finish()[..], 1).unwrap();
    assert!(bomb.len() < 100_000);
    let layer = unpack_with(&bomb, limits);
    assert!(
        layer.error().contains("more bytes than the limit"),
        "{}",
        layer.error()
    );
    // Also after the end marker of the archive.
    let mut late = TarBuilder::new().file("a", 0o644, b"x").finish();
    late.extend(&zeros);
    let layer = unpack_with(&zstd::encode_all(&late[..], 1).unwrap(), limits);
    assert!(layer.error().contains("more bytes"), "{}", layer.error());
    let mut many = TarBuilder::new();
    for at in 0..200 {
        many = many.directory(&format!("d{at}"), 0o755);
    }
    let layer = unpack_with(&many.finish(), limits);
    assert!(layer.error().contains("more files"), "{}", layer.error());
}

#[test]
fn memory_for_directory_paths_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(&dir.path().join("layers")).unwrap();
    let unpack = |archive: TarBuilder| {
        let archive = archive.finish();
        let (blob, digest) = (dir.path().join("blob"), Digest::of(&archive));
        fs::write(&blob, &archive).unwrap();
        let budget = UnpackBudget::new(ImageLimits::default());
        budget.directory_memory.store(1000, Relaxed);
        let result = layers.unpack(&blob, digest, digest, &budget);
        result.map_err(|error| crate::error_chain(&error))
    };
    let name = |at: usize| format!("{at:090}");
    let directories = |all: TarBuilder, at| all.directory(&name(at), 0o755);
    let files = |all: TarBuilder, at| all.file(&name(at), 0o644, b"");
    unpack((0..4).fold(TarBuilder::new(), directories)).unwrap();
    // Files do not count.
    unpack((0..100).fold(TarBuilder::new(), files)).unwrap();
    let error = unpack((0..5).fold(TarBuilder::new(), directories)).unwrap_err();
    assert!(error.contains("too much memory"), "{error}");
}

#[test]
fn damaged_archives_are_rejected() {
    let whole = TarBuilder::new().file("a", 0o644, &[7; 5000]).finish();
    for (archive, expected) in [
        (b"<html>not found</html>".to_vec(), "cannot read the layer"),
        (whole[..700].to_vec(), "cannot read the layer"),
        (whole[..300].to_vec(), "cannot read the layer"),
        (
            [&whole[..100], b"x", &whole[101..]].concat(),
            "checksum is wrong",
        ),
        (b"\x1f\x8b\x08 no gzip".to_vec(), "cannot read the layer"),
        (
            b"\x28\xb5\x2f\xfd no zstd".to_vec(),
            "cannot read the layer",
        ),
    ] {
        let layer = unpack_with(&archive, ImageLimits::default());
        assert!(layer.error().contains(expected), "{}", layer.error());
    }
    let big = TarBuilder::new().sized("a", u64::MAX / 2, b"x").finish();
    assert!(
        unpack_with(&big, ImageLimits::default())
            .error()
            .contains("cannot read the layer")
    );
}

#[test]
fn wrong_diff_id_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(dir.path()).unwrap();
    let blob = dir.path().join("blob");
    fs::write(&blob, TarBuilder::new().file("a", 0o644, b"evil").finish()).unwrap();
    let (digest, promised) = (Digest::of(b"blob"), Digest::of(b"promised"));
    let budget = UnpackBudget::new(ImageLimits::default());
    let error = layers.unpack(&blob, digest, promised, &budget).unwrap_err();
    assert!(error.is_archive_fault());
    assert!(!layers.has(promised, digest));
}

#[test]
fn layers_need_a_blob_that_unpacks_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(&dir.path().join("layers")).unwrap();
    let archive = TarBuilder::new().file("a", 0o644, b"private").finish();
    let packed = zstd::encode_all(&archive[..], 1).unwrap();
    let other = TarBuilder::new().file("a", 0o644, b"other").finish();
    let diff_id = Digest::of(&archive);
    let unpack = |bytes: &[u8], limits: ImageLimits| {
        let (blob, digest) = (dir.path().join("blob"), Digest::of(bytes));
        fs::write(&blob, bytes).unwrap();
        layers
            .unpack(&blob, digest, diff_id, &UnpackBudget::new(limits))
            .map_err(|error| error.is_archive_fault())
    };
    let path = unpack(&archive, ImageLimits::default()).unwrap();
    for hostile in [&other[..], b"no archive at all"] {
        assert_eq!(unpack(hostile, ImageLimits::default()), Err(true));
        assert!(!layers.has(diff_id, Digest::of(hostile)));
    }
    // The same layer in another compression, first beyond the size limit.
    let limits = |bytes| ImageLimits {
        bytes,
        ..ImageLimits::default()
    };
    assert_eq!(unpack(&packed, limits(100)), Err(false));
    assert!(!layers.has(diff_id, Digest::of(&packed)));
    assert_eq!(unpack(&packed, limits(1 << 20)), Ok(path));
    assert!(layers.has(diff_id, Digest::of(&packed)));
    assert!(layers.has(diff_id, Digest::of(&archive)));
    // The record of a blob stays valid after the layer was pruned.
    assert_eq!(layers.prune(std::time::Duration::ZERO).unwrap(), 1);
    assert!(!layers.has(diff_id, Digest::of(&archive)));
    unpack(&packed, ImageLimits::default()).unwrap();
    assert!(layers.has(diff_id, Digest::of(&archive)));
}

#[test]
fn sparse_files_of_all_formats_are_read() {
    // GNU tar's output for a file of 1 MiB with "start" at 0 and "end" at 1 MiB - 3.
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::create(dir.path().join("file")).unwrap();
    file.write_all(b"start").unwrap();
    io::Seek::seek(&mut file, io::SeekFrom::Start((1 << 20) - 3)).unwrap();
    file.write_all(b"end").unwrap();
    drop(file);
    let expected = fs::read(dir.path().join("file")).unwrap();
    for format in [
        &["--format=gnu"][..],
        &["--format=pax", "--sparse-version=0.0"],
        &["--format=pax", "--sparse-version=0.1"],
        &["--format=pax", "--sparse-version=1.0"],
    ] {
        let tar = std::process::Command::new("tar")
            .args(["--sparse", "--hole-detection=raw", "-cf", "-", "file"])
            .args(format)
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(tar.status.success());
        assert!(tar.stdout.len() < 100_000, "{format:?} is not sparse");
        let layer = unpack_with(&tar.stdout, ImageLimits::default());
        assert!(
            fs::read(layer.path("file")).unwrap() == expected,
            "{format:?}"
        );
        assert!(fs::metadata(layer.path("file")).unwrap().blocks() < 100);
    }
}

#[test]
fn all_formats_of_gnu_tar_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/file"), "x").unwrap();
    symlink("b", root.join("a/link")).unwrap();
    fs::hard_link(root.join("a/b/file"), root.join("a/hard")).unwrap();
    for format in ["v7", "oldgnu", "gnu", "ustar", "posix"] {
        let tar = std::process::Command::new("tar")
            .args(["-cf", "-", &format!("--format={format}"), "."])
            .current_dir(&root)
            .output()
            .unwrap();
        let layer = unpack_with(&tar.stdout, ImageLimits::default());
        assert_eq!(layer.text("a/hard"), "x", "{format}");
        assert_eq!(layer.text("a/link/file"), "x", "{format}");
    }
}

#[test]
fn layers_are_unpacked_once_and_held() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(&dir.path().join("layers")).unwrap();
    let archive = TarBuilder::new()
        .directory("closed", 0)
        .file("closed/file", 0, b"x")
        .finish();
    let (blob, digest) = (dir.path().join("blob"), Digest::of(&archive));
    fs::write(&blob, &archive).unwrap();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (layers, blob) = (layers.clone(), blob.clone());
            std::thread::spawn(move || {
                let budget = UnpackBudget::new(ImageLimits::default());
                layers.unpack(&blob, digest, digest, &budget).unwrap()
            })
        })
        .collect();
    let paths: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect();
    assert!(paths.iter().all(|path| *path == paths[0]));
    // The blob is no longer needed.
    fs::remove_file(&blob).unwrap();
    let budget = UnpackBudget::new(ImageLimits::default());
    layers.unpack(&blob, digest, digest, &budget).unwrap();
    let held = layers.hold(&paths[..1]).unwrap();
    assert_eq!(layers.prune(Duration::ZERO).unwrap(), 0);
    // Other processes may use it at the same time.
    let budget = UnpackBudget::new(ImageLimits::default());
    layers.unpack(&blob, digest, digest, &budget).unwrap();
    drop(held);
    assert_eq!(layers.prune_until(Duration::ZERO, || true).unwrap(), 0);
    assert_eq!(layers.prune(Duration::from_secs(60)).unwrap(), 0);
    assert_eq!(layers.prune(Duration::ZERO).unwrap(), 1);
    assert!(layers.hold(&paths[..1]).is_err());
    layers.remove_all().unwrap();
    assert!(!dir.path().join("layers").exists());
}

#[test]
fn leftover_of_killed_unpack_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(dir.path()).unwrap();
    let archive = TarBuilder::new().file("file", 0o644, b"x").finish();
    let (blob, digest) = (dir.path().join("blob"), Digest::of(&archive));
    fs::write(&blob, &archive).unwrap();
    let half = dir.path().join(format!(".new-{}", &digest.hex()[..32]));
    fs::create_dir(&half).unwrap();
    fs::write(half.join("half"), "").unwrap();
    let budget = UnpackBudget::new(ImageLimits::default());
    let path = layers.unpack(&blob, digest, digest, &budget).unwrap();
    assert!(path.join("file").exists() && !path.join("half").exists());
}

#[test]
fn prune_removes_leftovers_of_killed_processes() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(&dir.path().join("layers")).unwrap();
    let archive = TarBuilder::new().file("file", 0o644, b"x").finish();
    let (blob, digest) = (dir.path().join("blob"), Digest::of(&archive));
    fs::write(&blob, &archive).unwrap();
    let budget = UnpackBudget::new(ImageLimits::default());
    let path = layers.unpack(&blob, digest, digest, &budget).unwrap();
    let (name, other) = (&digest.hex()[..32], "0".repeat(32));
    let part = |kind: &str, name: &str| {
        let path = layers.path().join(format!(".{kind}-{name}"));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("part"), "").unwrap();
        path
    };
    // A layer whose lock is held is not a leftover.
    let (old, new) = (part("old", name), part("new", &other));
    let foreign = layers.path().join(".old-something");
    fs::create_dir(&foreign).unwrap();
    let lock = layers.lock_file(&other).unwrap();
    lock.lock().unwrap();
    assert_eq!(layers.prune_until(Duration::ZERO, || true).unwrap(), 0);
    assert!(path.join("file").exists() && !old.exists() && new.exists() && foreign.exists());
    drop(lock);
    assert_eq!(layers.prune(Duration::ZERO).unwrap(), 1);
    assert!(!path.exists() && !old.exists() && !new.exists());
}

#[test]
fn removal_never_shows_an_incomplete_layer() {
    let dir = tempfile::tempdir().unwrap();
    let layers = Layers::open(&dir.path().join("layers")).unwrap();
    let mut archive = TarBuilder::new();
    for at in 0..3000 {
        archive = archive.file(&format!("file{at}"), 0o644, b"");
    }
    let archive = archive.finish();
    let (blob, digest) = (dir.path().join("blob"), Digest::of(&archive));
    fs::write(&blob, &archive).unwrap();
    let budget = UnpackBudget::new(ImageLimits::default());
    let path = layers.unpack(&blob, digest, digest, &budget).unwrap();
    let removing = std::thread::spawn(move || layers.prune(Duration::ZERO).unwrap());
    while let Ok(list) = fs::read_dir(&path) {
        let found = list.count();
        // After the rename, the open directory may have lost files.
        assert!(found == 3000 || !path.exists(), "{found}");
    }
    assert_eq!(removing.join().unwrap(), 1);
}

/// All entries below a directory, with their types.
fn listing(root: &Path) -> BTreeMap<PathBuf, FileType> {
    let mut all = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let found = fs::symlink_metadata(entry.path()).unwrap();
            if found.is_dir() {
                todo.push(entry.path());
            }
            all.insert(entry.path(), FileType::from_raw_mode(found.mode()));
        }
    }
    all
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(200))]

    /// No combination of names and links changes a file outside of the layer or creates a device other than a whiteout.
    #[test]
    fn unpack_changes_nothing_outside(entries in proptest::collection::vec(
        (0..6u8, path_strategy(), path_strategy()), 1..12))
    {
        let mut archive = TarBuilder::new();
        for (kind, name, target) in &entries {
            archive = match kind {
                0 => archive.file(name, 0o644, b"evil"),
                1 => archive.directory(name, 0o755),
                2 => archive.symlink(name, target),
                3 => archive.hard_link(name, target),
                4 => archive.fifo(name, 0o600),
                _ => archive.device(name, b'3', 0, 0),
            };
        }
        let archive = archive.finish();
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/secret"), "untouched").unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        let ids = ids::IdMappings::of_this_process();
        let _ = unpack::unpack(File::open(&root).unwrap().into(), &archive[..], &ids,
            &UnpackBudget::new(ImageLimits::default()));
        proptest::prop_assert_eq!(fs::read(dir.path().join("outside/secret")).unwrap(), b"untouched");
        proptest::prop_assert_eq!(fs::metadata(dir.path().join("outside/secret")).unwrap().nlink(), 1);
        proptest::prop_assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 1);
        proptest::prop_assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        for (path, kind) in listing(&root) {
            if kind == FileType::CharacterDevice {
                proptest::prop_assert_eq!(fs::symlink_metadata(path).unwrap().rdev(), 0);
            }
        }
    }
}

proptest::proptest! {
    /// A damaged archive may be rejected, or unpack to something else, but never panics.
    #[test]
    fn damaged_archives_never_panic(changes in proptest::collection::vec((0..6000usize, proptest::num::u8::ANY), 1..20)) {
        let mut archive = TarBuilder::new()
            .pax(&[("path", b"long/name"), ("GNU.sparse.size", b"10"), ("GNU.sparse.map", b"0,1")])
            .file("a", 0o644, b"x")
            .gnu_long_name("other/name")
            .file("b", 0o644, &[1; 600])
            .directory("c", 0o755)
            .symlink("d", "c")
            .finish();
        for (at, value) in changes {
            let at = at % archive.len();
            archive[at] = value;
        }
        let mut tar = tar::TarReader::new(&archive[..]);
        while let Ok(Some(_)) = tar.next() {}
        let dir = tempfile::tempdir().unwrap();
        let ids = ids::IdMappings::of_this_process();
        let _ = unpack::unpack(File::open(dir.path()).unwrap().into(), &archive[..], &ids,
            &UnpackBudget::new(ImageLimits { bytes: 1 << 20, entries: 100 }));
    }
}

fn path_strategy() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::strategy::Strategy;
    let part = proptest::sample::select(vec![
        "a",
        "b",
        "..",
        ".",
        "",
        "outside",
        "secret",
        ".wh.a",
        ".wh..wh..opq",
        "proc",
        "self",
    ]);
    proptest::collection::vec(part, 1..5).prop_map(|parts| parts.join("/"))
}

#[test]
fn modes_do_not_depend_on_the_umask() {
    // The umask belongs to the whole process; other tests set modes explicitly.
    let before = rustix::process::umask(Mode::from_raw_mode(0o077));
    let layer = unpack(TarBuilder::new().file("made/file", 0o666, b"x"));
    rustix::process::umask(before);
    assert_eq!(layer.mode("made/file"), 0o666);
    assert_eq!(layer.mode("made"), 0o755);
    assert_eq!(layer.mode(""), 0o755);
}
