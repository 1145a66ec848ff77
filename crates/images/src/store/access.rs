//! Who may use an image that is here: those who could have pulled it.
//!
//! An image that was pulled with the secret of a pod is not for pods without it: they have to show the registry theirs
//! first. An image that needed no secret, or the user's own, and one that was loaded, is for everybody.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Store, StoreError, Stored};
use crate::digest::Digest;
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
        let Some(record) = self.access_record(image)? else {
            return Ok(true);
        };
        let access = record.repositories.get(&reference.name());
        Ok(access.is_some_and(|access| {
            access.everybody || marks.iter().any(|mark| access.secrets.contains(mark))
        }))
    }

    /// Notes that the registry has let somebody have the image: who has the secret of this mark or, without one, anybody.
    pub fn open_to(
        &self,
        reference: &Reference,
        image: &Stored,
        mark: Option<Digest>,
    ) -> Result<(), StoreError> {
        let known = self.access_record(image)?;
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
        // Stores that were made before have no such directory.
        let dir = self.access();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| StoreError::io("make the directory", &dir, e))?;
        let path = self.access_path(image);
        let text = serde_json::to_vec(&record)
            .map_err(|e| StoreError::io("write", &path, io::Error::other(e)))?;
        self.write_whole(&path, &text)
    }

    /// The user has brought an image here by hand, which makes it everybody's, whoever has pulled it before.
    pub fn open_to_all(&self, reference: &Reference, image: &Stored) -> Result<(), StoreError> {
        match self.access_record(image)? {
            Some(_) => self.open_to(reference, image, None),
            None => Ok(()),
        }
    }

    /// Removes what is known of images whose blobs are gone; what can't be removed only takes room.
    pub(super) fn forget_access(&self, needed: &HashSet<Digest>) {
        for entry in fs::read_dir(self.access()).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let digest = name.and_then(Digest::from_hex);
            if digest.is_some_and(|digest| !needed.contains(&digest)) {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// `None`: it was never pulled. A record that can't be understood lets nobody in.
    fn access_record(&self, image: &Stored) -> Result<Option<Record>, StoreError> {
        let path = self.access_path(image);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::io("read", &path, error)),
        }
    }

    /// By the configuration, which is the same whatever names and indexes lead to the image.
    fn access_path(&self, image: &Stored) -> PathBuf {
        let hex = image.manifest.config.digest.hex();
        self.access().join(format!("{hex}.json"))
    }
}
