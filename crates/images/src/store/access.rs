//! Who may use an image that is here: those who could have pulled it.
//!
//! An image that was pulled with the secret of a pod is not for pods without it: they have to show the registry theirs
//! first. An image that needed no secret, or the user's own, and one that was loaded, is for everybody. One that is being
//! pulled is for nobody until all of it is here, and stays so if that never happens.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::gc::young;
use super::{Store, StoreError, Stored};
use crate::digest::Digest;
use crate::manifest::Descriptor;
use crate::reference::Reference;

/// So many secrets are remembered of one repository; who has another asks the registry.
const MOST_SECRETS: usize = 100;

/// Of one image: by repository, who was let in.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    repositories: BTreeMap<String, Access>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Access {
    /// No secret of a pod was needed.
    #[serde(default)]
    everybody: bool,
    /// Marks of the secrets that were.
    #[serde(default)]
    secrets: BTreeSet<Digest>,
}

impl Store {
    /// Whether who holds secrets of these marks may use the image without asking its registry.
    pub fn is_open(
        &self,
        reference: &Reference,
        image: &Stored,
        marks: &[Digest],
    ) -> Result<bool, StoreError> {
        let Some(record) = self.access_record(&image.manifest.config)? else {
            return Ok(true);
        };
        let access = record.repositories.get(&reference.name());
        Ok(access.is_some_and(|access| {
            access.everybody || marks.iter().any(|mark| access.secrets.contains(mark))
        }))
    }

    /// To be called before an image's configuration is brought here by a pull: nobody may use the image until [`Store::open_to`]
    /// says who. What is here already stays as open as it is.
    pub fn close_new(&self, config: &Descriptor) -> Result<(), StoreError> {
        match self.has(config) || self.access_record(config)?.is_some() {
            true => Ok(()),
            false => self.write_access(&self.access_path(config.digest), &Record::default()),
        }
    }

    /// Notes that the registry has let somebody have the image: who has the secret of this mark or, without one, anybody.
    pub fn open_to(
        &self,
        reference: &Reference,
        image: &Stored,
        mark: Option<Digest>,
    ) -> Result<(), StoreError> {
        let config = &image.manifest.config;
        let known = self.access_record(config)?;
        let is_new = known.is_none();
        let mut record = known.unwrap_or_default();
        let access = record.repositories.entry(reference.name()).or_default();
        let before = access.clone();
        match mark {
            Some(mark) if access.secrets.len() < MOST_SECRETS => _ = access.secrets.insert(mark),
            Some(_) => {}
            None => access.everybody = true,
        }
        if *access == before && !is_new {
            return Ok(());
        }
        self.write_access(&self.access_path(config.digest), &record)
    }

    /// The user has brought an image here by hand, which makes it everybody's, whoever has pulled it before.
    pub fn open_to_all(&self, reference: &Reference, image: &Stored) -> Result<(), StoreError> {
        match self.access_record(&image.manifest.config)? {
            Some(_) => self.open_to(reference, image, None),
            None => Ok(()),
        }
    }

    /// Removes what is known of images that are gone; what can't be removed only takes room. Unless it is `certain` that nobody
    /// pulls, an image may be about to come.
    pub(super) fn forget_access(&self, certain: bool) {
        for entry in fs::read_dir(self.access()).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let digest = name.and_then(Digest::from_hex);
            if digest.is_some_and(|digest| !self.blob_path(digest).exists())
                && (certain || !young(&path))
            {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// `None`: it was never pulled. A record that can't be understood lets nobody in.
    fn access_record(&self, config: &Descriptor) -> Result<Option<Record>, StoreError> {
        let path = self.access_path(config.digest);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::io("read", &path, error)),
        }
    }

    fn write_access(&self, path: &Path, record: &Record) -> Result<(), StoreError> {
        // Stores that were made before have no such directory.
        let dir = self.access();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| StoreError::io("make the directory", &dir, e))?;
        let text = serde_json::to_vec(record)
            .map_err(|e| StoreError::io("write", path, io::Error::other(e)))?;
        self.write_whole(path, &text)
    }

    /// By the configuration, which is the same whatever names and indexes lead to the image.
    fn access_path(&self, config: Digest) -> PathBuf {
        self.access().join(format!("{}.json", config.hex()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_stays_as_long_as_the_image_may_be_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let config = Descriptor {
            media_type: String::new(),
            digest: Digest::of(b"config"),
            size: 6,
            platform: None,
            annotations: BTreeMap::new(),
        };
        let known = || store.access_record(&config).unwrap().is_some();
        // Under way: whether the pull still lives is not known without locks.
        store.close_new(&config).unwrap();
        store.forget_access(false);
        assert!(known());
        store.forget_access(true);
        assert!(!known());
        // There.
        store.close_new(&config).unwrap();
        store.put(b"config").unwrap();
        store.forget_access(true);
        assert!(known());
        // What has come without a pull stays open.
        fs::remove_file(store.access_path(config.digest)).unwrap();
        store.close_new(&config).unwrap();
        assert!(!known());
    }
}
