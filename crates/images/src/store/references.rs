//! What names stand for.

use std::fs::{self, File, FileTimes};
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{Store, StoreError};
use crate::digest::Digest;
use crate::manifest::Descriptor;
use crate::reference::Reference;

/// A reference as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Its full name.
    pub reference: String,
    /// What it stands for.
    pub descriptor: Descriptor,
    /// When it came, in seconds since 1970.
    pub pulled: u64,
}

/// A line of `coracle image ls`.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// The full name.
    pub reference: String,
    /// What it stands for.
    pub digest: Digest,
    /// The size of its blobs.
    pub size: u64,
    /// When it was pulled or loaded, in seconds since 1970.
    pub pulled: u64,
    /// When it was last used, in seconds since 1970.
    pub used: u64,
    /// Whether all of its blobs are there.
    pub complete: bool,
}

impl Store {
    fn record_path(&self, reference: &Reference) -> PathBuf {
        // Names are longer than file names may be.
        let hash = Digest::of(reference.to_string().as_bytes()).hex();
        self.references().join(format!("{}.json", &hash[..40]))
    }

    /// What `reference` stands for, if it is known.
    pub fn lookup(&self, reference: &Reference) -> Result<Option<Descriptor>, StoreError> {
        if let Some(record) = self.read_record(&self.record_path(reference))? {
            return Ok((record.reference == reference.to_string()).then_some(record.descriptor));
        }
        // A digest names the same thing wherever it comes from.
        let Some(digest) = reference.digest() else {
            return Ok(None);
        };
        Ok(self.read_document(digest)?.map(|bytes| Descriptor {
            media_type: String::new(),
            digest,
            size: bytes.len() as u64,
            platform: None,
            annotations: Default::default(),
        }))
    }

    /// From now on `reference` stands for `descriptor`.
    pub fn name(&self, reference: &Reference, descriptor: &Descriptor) -> Result<(), StoreError> {
        let path = self.record_path(reference);
        let record = Record {
            reference: reference.to_string(),
            descriptor: descriptor.clone(),
            pulled: seconds(SystemTime::now()),
        };
        let text = serde_json::to_vec(&record)
            .map_err(|e| StoreError::io("write", &path, io::Error::other(e)))?;
        self.write_whole(&path, &text)
    }

    /// Notes that `reference` was used now, for those who remove by age.
    pub fn touch(&self, reference: &Reference) {
        let now = FileTimes::new().set_modified(SystemTime::now());
        // A store that can only be read has no age to keep.
        let _ = File::options()
            .append(true)
            .open(self.record_path(reference))
            .and_then(|file| file.set_times(now));
    }

    /// Forgets a reference; says which names went, none if it isn't known. Its blobs stay until they are collected. With a
    /// digest, all names go under which the repository's image of that digest is known.
    pub fn forget(&self, reference: &Reference) -> Result<Vec<Reference>, StoreError> {
        let mut names = vec![reference.clone()];
        if let (Some(digest), None) = (reference.digest(), reference.tag()) {
            let records = self.records()?.into_iter();
            let same = records.filter(|(record, _)| record.descriptor.digest == digest);
            let others = same.filter_map(|(record, _)| record.reference.parse::<Reference>().ok());
            names.extend(others.filter(|name| name.name() == reference.name()));
        }
        let mut gone = Vec::new();
        for name in names {
            if self.forget_name(&name)? {
                gone.push(name);
            }
        }
        Ok(gone)
    }

    pub(super) fn forget_name(&self, reference: &Reference) -> Result<bool, StoreError> {
        let path = self.record_path(reference);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(StoreError::io("remove", &path, error)),
        }
    }

    /// All references, by name.
    pub fn list(&self) -> Result<Vec<Summary>, StoreError> {
        let mut all = Vec::new();
        for (record, used) in self.records()? {
            let image = self.image(&record.descriptor).unwrap_or(None);
            let complete = image
                .as_ref()
                .is_some_and(|image| image.manifest.blobs().all(|blob| self.has(blob)));
            all.push(Summary {
                digest: record.descriptor.digest,
                size: image.map_or(0, |image| image.manifest.size()),
                pulled: record.pulled,
                used: seconds(used),
                complete,
                reference: record.reference,
            });
        }
        all.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(all)
    }

    /// All records, with the time of their last use.
    pub(super) fn records(&self) -> Result<Vec<(Record, SystemTime)>, StoreError> {
        let dir = self.references();
        let failed = |e| StoreError::io("list", &dir, e);
        let mut all = Vec::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let used = fs::metadata(&path).and_then(|found| found.modified());
            if let Some(record) = self.read_record(&path)? {
                all.push((record, used.unwrap_or(UNIX_EPOCH)));
            }
        }
        Ok(all)
    }

    /// `None`: not there, or no record. The latter can't come from us: it is passed over.
    fn read_record(&self, path: &std::path::Path) -> Result<Option<Record>, StoreError> {
        match fs::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::io("read", path, error)),
        }
    }
}

pub(super) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
