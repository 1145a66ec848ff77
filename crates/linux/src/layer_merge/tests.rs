use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use super::*;

struct Layers(tempfile::TempDir, Vec<PathBuf>);

impl Layers {
    fn new(count: usize) -> Self {
        let home = tempfile::tempdir().unwrap();
        let layers: Vec<PathBuf> = (0..count)
            .map(|n| home.path().join(n.to_string()))
            .collect();
        layers
            .iter()
            .for_each(|layer| fs::create_dir(layer).unwrap());
        fs::create_dir(home.path().join("target")).unwrap();
        Self(home, layers)
    }

    fn write(&self, layer: usize, path: &str, text: &str) {
        let path = self.1[layer].join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn white_out(&self, layer: usize, path: &str) {
        let path = self.1[layer].join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    }

    fn make_opaque(&self, layer: usize, path: &str) {
        let path = self.1[layer].join(path);
        fs::create_dir_all(&path).unwrap();
        rustix::fs::setxattr(path, OPAQUE_XATTR, b"y", XattrFlags::empty()).unwrap();
    }

    fn target(&self) -> PathBuf {
        self.0.path().join("target")
    }

    /// All paths of the result, with their content.
    fn merged(&self) -> Vec<String> {
        merge_layers(&self.1, &self.target()).unwrap();
        let mut found = Vec::new();
        list(&self.target(), "", &mut found);
        found.sort();
        found
    }
}

fn list(dir: &Path, shown: &str, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{shown}/{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.push(format!("{name}/"));
            list(&entry.path(), &name, found);
        } else if kind.is_symlink() {
            found.push(format!(
                "{name} -> {}",
                fs::read_link(entry.path()).unwrap().display()
            ));
        } else {
            found.push(format!(
                "{name} {}",
                fs::read_to_string(entry.path()).unwrap()
            ));
        }
    }
}

#[test]
fn upper_layers_cover_lower_layers() {
    let layers = Layers::new(3);
    for path in [
        "etc/a",
        "etc/b",
        "usr/x",
        "usr/deep/y",
        "var/z",
        "kind",
        "link/old",
    ] {
        layers.write(0, path, "0");
    }
    layers.white_out(1, "etc/a");
    layers.write(1, "etc/b", "1");
    layers.make_opaque(1, "usr");
    layers.write(1, "usr/new", "1");
    layers.white_out(1, "var");
    layers.write(1, "kind/now-a-directory", "1");
    symlink("/etc", layers.1[1].join("link")).unwrap();
    // Deleted content must not reappear.
    layers.write(2, "var/back", "2");
    layers.write(2, "usr/deep/again", "2");
    layers.write(2, "link/new", "2");
    assert_eq!(
        layers.merged(),
        [
            "/etc/",
            "/etc/b 1",
            "/kind/",
            "/kind/now-a-directory 1",
            "/link/",
            "/link/new 2",
            "/usr/",
            "/usr/deep/",
            "/usr/deep/again 2",
            "/usr/new 1",
            "/var/",
            "/var/back 2",
        ]
    );
}

#[test]
fn wh_files_mark_deletions() {
    let layers = Layers::new(2);
    for path in ["a", "b", "dir/x", "all/old", "again"] {
        layers.write(0, path, "0");
    }
    layers.write(1, ".wh.a", "");
    layers.write(1, ".wh.dir", "");
    layers.write(1, "all/.wh..wh..opq", "");
    layers.write(1, "all/new", "1");
    layers.write(1, ".wh.again", "");
    layers.write(1, "again", "1");
    assert_eq!(layers.merged(), ["/again 1", "/all/", "/all/new 1", "/b 0"]);
}

#[test]
fn wh_file_in_middle_layer_deletes_a_directory() {
    let layers = Layers::new(3);
    layers.write(0, "dir/old", "0");
    layers.write(1, ".wh.dir", "");
    layers.write(2, "dir/new", "2");
    assert_eq!(layers.merged(), ["/dir/", "/dir/new 2"]);
}

#[test]
fn metadata_hard_links_and_holes_are_preserved() {
    let layers = Layers::new(2);
    layers.write(0, "bin/tool", "tool");
    let tool = layers.1[0].join("bin/tool");
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(&tool, layers.1[0].join("other-name")).unwrap();
    rustix::fs::setxattr(&tool, "user.note", b"kept", XattrFlags::empty()).unwrap();
    fs::set_permissions(layers.1[0].join("bin"), fs::Permissions::from_mode(0o1777)).unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    fs::File::open(layers.1[0].join("bin"))
        .unwrap()
        .set_modified(time)
        .unwrap();
    symlink("../../../outside", layers.1[1].join("link")).unwrap();
    let sparse = fs::File::create(layers.1[1].join("sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    rustix::io::pwrite(&sparse, b"end", (64 << 20) - 3).unwrap();
    rustix::fs::mknodat(CWD, layers.1[1].join("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();

    let disk_bytes = merge_layers(&layers.1, &layers.target()).unwrap();
    let found = |path: &str| fs::symlink_metadata(layers.target().join(path)).unwrap();
    assert_eq!(found("bin/tool").mode() & 0o7777, 0o4755);
    assert_eq!(found("bin/tool").ino(), found("other-name").ino());
    assert_eq!(found("bin").mode() & 0o7777, 0o1777);
    assert_eq!(found("bin").modified().unwrap(), time);
    assert!(found("link").is_symlink());
    assert_eq!(found("sparse").len(), 64 << 20);
    assert!(found("sparse").blocks() * 512 < 8 << 20);
    assert!(disk_bytes < 16 << 20, "{disk_bytes}");
    assert_eq!(
        FileType::from_raw_mode(found("pipe").mode()),
        FileType::Fifo
    );
    let end = fs::read(layers.target().join("sparse")).unwrap();
    assert!(end.ends_with(b"\0end"));
    let mut value = [0; 4];
    let tool = layers.target().join("bin/tool");
    rustix::fs::getxattr(tool, "user.note", &mut value[..]).unwrap();
    assert_eq!(&value, b"kept");
}

#[test]
fn existing_file_in_target_is_an_error() {
    let layers = Layers::new(1);
    layers.write(0, "a/b", "x");
    fs::create_dir(layers.target().join("a")).unwrap();
    let error = merge_layers(&layers.1, &layers.target()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
}
