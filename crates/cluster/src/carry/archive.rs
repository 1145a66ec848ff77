//! The tar archive that is carried to a leader's node beside this program: release, seed and workload.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use releases::{Release, ReleaseComponent};
use tar::{Builder, EntryType, Header};

use super::{COMPLETE, PROGRAM, RELEASES, UNFINISHED, WORKLOAD};

/// Everything that a leader needs beside this program.
#[derive(Debug)]
pub struct CarryArchive {
    /// This program, which is carried separately.
    pub program: PathBuf,
    /// The release of Kubernetes, if this host has one.
    pub release: Option<Release>,
    /// The prepared store of that release.
    pub seed: Option<PathBuf>,
    /// The workload's file or directory; programs found in PATH are not carried.
    pub workload: Option<PathBuf>,
    /// Which files of a directory belong to the workload.
    pub is_workload_file: fn(&Path) -> bool,
}

/// A file that the node must see; if it lacks one, the archive is carried.
#[derive(Debug, PartialEq, Eq)]
pub struct NeededFile {
    /// The path on both hosts.
    pub path: PathBuf,
    /// Size and modification time (`stat --format=%s-%Y`), to detect another file at that path; empty if any file will do.
    pub size_and_mtime: String,
}

impl CarryArchive {
    /// The files that make the archive unnecessary if the node sees all of them.
    pub fn needed_files(&self) -> Vec<NeededFile> {
        let if_it_exists = |path: PathBuf| NeededFile {
            path,
            size_and_mtime: String::new(),
        };
        let mut files = vec![if_it_exists(self.program.clone())];
        if let Some(release) = &self.release {
            files.push(if_it_exists(release.component(ReleaseComponent::ApiServer)));
        }
        if let Some(path) = &self.workload {
            files.push(NeededFile {
                path: path.clone(),
                size_and_mtime: size_and_mtime(path),
            });
        }
        files
    }

    /// Writes the tar archive.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        let mut archive = Builder::new(to);
        archive.follow_symlinks(false);
        if let Some(release) = &self.release {
            let path_in_archive = Path::new(RELEASES).join(&release.version);
            add_programs(&mut archive, &release.dir, &path_in_archive)?;
            if let Some(seed) = &self.seed
                && let Some(name) = seed.file_name()
            {
                archive.append_dir_all(path_in_archive.join("seeds").join(name), seed)?;
            }
        }
        if let Some(path) = &self.workload
            && let Some(name) = path.file_name()
        {
            let path_in_archive = Path::new(WORKLOAD).join(name);
            self.add_workload(&mut archive, path, &path_in_archive)?;
        }
        add_empty_file(&mut archive, COMPLETE)?;
        archive.into_inner()?.flush()
    }

    fn add_workload(
        &self,
        archive: &mut Builder<impl Write>,
        path: &Path,
        path_in_archive: &Path,
    ) -> io::Result<()> {
        if !path.is_dir() {
            return archive.append_file(path_in_archive, &mut File::open(path)?);
        }
        archive.append_dir(path_in_archive, path)?;
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            // Links to directories are not followed: they may form a cycle.
            if entry.file_type()?.is_dir() || (self.is_workload_file)(&entry.path()) {
                self.add_workload(
                    archive,
                    &entry.path(),
                    &path_in_archive.join(entry.file_name()),
                )?;
            }
        }
        Ok(())
    }
}

/// Unpacks an archive that arrives on `from` into the working directory, then gives the program there its final name, which a
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

/// Unpacks an archive into the directory `to`; an error if the archive is incomplete.
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
            "the stream from the submitting host ended early",
        )
    })
}

/// Adds the files of a release. Links among them stay links (one program may have many names); others are followed.
fn add_programs(
    archive: &mut Builder<impl Write>,
    dir: &Path,
    path_in_archive: &Path,
) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let (path, path_in_archive) = (entry.path(), path_in_archive.join(entry.file_name()));
        let links_within = std::fs::read_link(&path).is_ok_and(|to| to.components().count() == 1);
        if links_within {
            archive.append_path_with_name(&path, &path_in_archive)?;
        } else if path.is_file() {
            archive.append_file(&path_in_archive, &mut File::open(&path)?)?;
        }
    }
    Ok(())
}

fn add_empty_file(archive: &mut Builder<impl Write>, name: &str) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_size(0);
    archive.append_data(&mut header, name, io::empty())
}

fn size_and_mtime(path: &Path) -> String {
    path.metadata()
        .map(|meta| format!("{}-{}", meta.size(), meta.mtime()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_arrives_unchanged_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (name, text) in [
            ("release/kube", "program"),
            ("release/seeds/other/db", "another seed"),
            ("seed/member/db", "data"),
            ("app/a.yaml", "a"),
            ("app/deep/b.yaml", "b"),
            ("app/notes.txt", "not a manifest"),
        ] {
            std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            std::fs::write(at(name), text).unwrap();
        }
        std::os::unix::fs::symlink("kube", at("release/etcd")).unwrap();
        std::os::unix::fs::symlink(at("app/a.yaml"), at("release/VERSION")).unwrap();
        let archive = CarryArchive {
            program: at("coracle"),
            release: Some(Release {
                dir: at("release"),
                version: "v1".into(),
            }),
            seed: Some(at("seed")),
            workload: Some(at("app")),
            is_workload_file: |path| path.extension().is_some_and(|e| e == "yaml"),
        };
        let mut stream = Vec::new();
        archive.write(&mut stream).unwrap();
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
