//! The bundle that is carried to a leader's node beside this program: release, seed and workload, as a tar archive.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use releases::{Component, Release};
use tar::{Builder, EntryType, Header};

use super::{COMPLETE, PROGRAM, RELEASES, UNFINISHED, WORKLOAD};

/// Everything that a leader needs beside this program.
#[derive(Debug)]
pub struct Bundle {
    /// This program, which is carried separately.
    pub program: PathBuf,
    /// The release of Kubernetes, if this host has one.
    pub release: Option<Release>,
    /// The prepared store of that release.
    pub seed: Option<PathBuf>,
    /// The workload's file or directory; programs found in PATH are not carried.
    pub workload: Option<PathBuf>,
    /// Which files of a directory belong to the workload.
    pub is_part: fn(&Path) -> bool,
}

/// A file that the node must see; if it lacks one, the bundle is carried.
#[derive(Debug, PartialEq, Eq)]
pub struct Needed {
    /// Its path.
    pub path: PathBuf,
    /// Size and modification time (`stat --format=%s-%Y`), which distinguish it from another file at that path; empty if existence
    /// is enough.
    pub stamp: String,
}

impl Bundle {
    /// The files that make the bundle unnecessary if the node sees all of them.
    pub fn needed(&self) -> Vec<Needed> {
        let there = |path: PathBuf| Needed {
            path,
            stamp: String::new(),
        };
        let mut needed = vec![there(self.program.clone())];
        if let Some(release) = &self.release {
            needed.push(there(release.component(Component::ApiServer)));
        }
        if let Some(path) = &self.workload {
            needed.push(Needed {
                path: path.clone(),
                stamp: stamp(path),
            });
        }
        needed
    }

    /// Writes the archive.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        let mut archive = Builder::new(to);
        archive.follow_symlinks(false);
        if let Some(release) = &self.release {
            let inside = Path::new(RELEASES).join(&release.version);
            add_programs(&mut archive, &release.dir, &inside)?;
            if let Some(seed) = &self.seed
                && let Some(name) = seed.file_name()
            {
                archive.append_dir_all(inside.join("seeds").join(name), seed)?;
            }
        }
        if let Some(path) = &self.workload
            && let Some(name) = path.file_name()
        {
            let inside = Path::new(WORKLOAD).join(name);
            self.add_workload(&mut archive, path, &inside)?;
        }
        add_empty(&mut archive, COMPLETE)?;
        archive.into_inner()?.flush()
    }

    fn add_workload(
        &self,
        archive: &mut Builder<impl Write>,
        path: &Path,
        inside: &Path,
    ) -> io::Result<()> {
        if !path.is_dir() {
            return archive.append_file(inside, &mut File::open(path)?);
        }
        archive.append_dir(inside, path)?;
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            // Links to directories are not followed: they may form a cycle.
            if entry.file_type()?.is_dir() || (self.is_part)(&entry.path()) {
                self.add_workload(archive, &entry.path(), &inside.join(entry.file_name()))?;
            }
        }
        Ok(())
    }
}

/// Unpacks a bundle that arrives on `from` into the working directory, then gives the program there its final name, which a
/// leader waits for. Paths are relative because another process may remove the directory meanwhile, and its name may then
/// belong to another user.
pub fn receive(from: impl Read) -> io::Result<()> {
    unpack(from, Path::new("."))?;
    std::fs::rename(UNFINISHED, PROGRAM)
}

/// Removes the working directory, whose name is `dir`, unless [`receive`] has completed it.
pub fn remove_incomplete(dir: &Path) {
    if !Path::new(PROGRAM).exists() {
        // Fails at the directory itself, when it is empty.
        let _ = std::fs::remove_dir_all(".");
        let _ = std::fs::remove_dir(dir);
    }
}

/// Unpacks a bundle into the directory `to`; an error if the bundle is incomplete.
fn unpack(from: impl Read, to: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(from);
    archive.set_preserve_permissions(true);
    // Not with `Archive::unpack`, which resolves the directory's name. As there, directories come last: they may be read-only.
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_dir() {
            directories.push(entry);
        } else {
            entry.unpack_in(to)?;
        }
    }
    directories.sort_by(|a, b| b.path_bytes().cmp(&a.path_bytes()));
    for mut directory in directories {
        directory.unpack_in(to)?;
    }
    std::fs::remove_file(to.join(COMPLETE)).map_err(|_| {
        io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "what the submitting host sends broke off",
        )
    })
}

/// The files of a release. Links among them stay links (one program may have many names); others are
/// followed.
fn add_programs(archive: &mut Builder<impl Write>, dir: &Path, inside: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let (path, inside) = (entry.path(), inside.join(entry.file_name()));
        let links_within = std::fs::read_link(&path).is_ok_and(|to| to.components().count() == 1);
        if links_within {
            archive.append_path_with_name(&path, &inside)?;
        } else if path.is_file() {
            archive.append_file(&inside, &mut File::open(&path)?)?;
        }
    }
    Ok(())
}

fn add_empty(archive: &mut Builder<impl Write>, name: &str) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_size(0);
    archive.append_data(&mut header, name, io::empty())
}

fn stamp(path: &Path) -> String {
    path.metadata()
        .map(|meta| format!("{}-{}", meta.size(), meta.mtime()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundle_arrives_unchanged_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (name, text) in [
            ("release/kube", "program"),
            ("release/seeds/other/db", "not this one"),
            ("seed/member/db", "data"),
            ("app/a.yaml", "a"),
            ("app/deep/b.yaml", "b"),
            ("app/notes.txt", "none of it"),
        ] {
            std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            std::fs::write(at(name), text).unwrap();
        }
        std::os::unix::fs::symlink("kube", at("release/etcd")).unwrap();
        std::os::unix::fs::symlink(at("app/a.yaml"), at("release/VERSION")).unwrap();
        let bundle = Bundle {
            program: at("coracle"),
            release: Some(Release {
                dir: at("release"),
                version: "v1".into(),
            }),
            seed: Some(at("seed")),
            workload: Some(at("app")),
            is_part: |path| path.extension().is_some_and(|e| e == "yaml"),
        };
        let mut stream = Vec::new();
        bundle.write(&mut stream).unwrap();
        let to = at("to");
        std::fs::create_dir(&to).unwrap();
        unpack(&stream[..], &to).unwrap();
        let read = |name: &str| std::fs::read_to_string(to.join(name)).unwrap();
        assert_eq!(read("kubernetes/v1/etcd"), "program");
        assert_eq!(
            std::fs::read_link(to.join("kubernetes/v1/etcd")).unwrap(),
            Path::new("kube")
        );
        assert_eq!(read("kubernetes/v1/VERSION"), "a");
        assert_eq!(read("kubernetes/v1/seeds/seed/member/db"), "data");
        assert_eq!(read("workload/app/deep/b.yaml"), "b");
        for absent in [
            "workload/app/notes.txt",
            "kubernetes/v1/seeds/other",
            "complete",
        ] {
            assert!(!to.join(absent).exists(), "{absent}");
        }
        // A truncated stream is an error, wherever it ends.
        for length in [0, 512, stream.len() / 2, stream.len() - 2048] {
            let to = at(&format!("cut-{length}"));
            std::fs::create_dir(&to).unwrap();
            let unpacked = unpack(&stream[..length], &to);
            assert!(unpacked.is_err(), "{length} of {}", stream.len());
        }
    }
}
