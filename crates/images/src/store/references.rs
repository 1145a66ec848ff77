//! References: the names of stored images.

use std::fs::{self, File, FileTimes};
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{ImageStore, ImageStoreError};
use crate::manifest::Descriptor;
use crate::reference::Reference;
use download::Digest;

/// The content of a reference's file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReferenceRecord {
    /// The full name.
    pub reference: String,
    /// Its manifest or index.
    pub descriptor: Descriptor,
    /// When it was pulled or loaded, in seconds since 1970.
    pub pulled: u64,
}

/// A line of `coracle image ls`.
#[derive(Debug, Clone, Serialize)]
pub struct ImageSummary {
    /// The full name.
    pub reference: String,
    /// The digest of its manifest or index.
    pub digest: Digest,
    /// The size of its blobs.
    pub size: u64,
    /// When it was pulled or loaded, in seconds since 1970.
    pub pulled: u64,
    /// When it was last used, in seconds since 1970.
    pub used: u64,
    /// Whether the store has all of its blobs.
    pub complete: bool,
}

impl ImageStore {
    fn record_path(&self, reference: &Reference) -> PathBuf {
        // Hashed, because names may be longer than NAME_MAX.
        let hash = Digest::of(reference.to_string().as_bytes()).hex();
        self.references().join(format!("{}.json", &hash[..40]))
    }

    /// The manifest or index of `reference`, if the store has it.
    pub fn lookup(&self, reference: &Reference) -> Result<Option<Descriptor>, ImageStoreError> {
        if let Some(record) = self.read_record(&self.record_path(reference))? {
            return Ok((record.reference == reference.to_string()).then_some(record.descriptor));
        }
        // A digest identifies the same document in every repository.
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

    /// Makes `reference` refer to `descriptor`.
    pub fn set_reference(
        &self,
        reference: &Reference,
        descriptor: &Descriptor,
    ) -> Result<(), ImageStoreError> {
        let path = self.record_path(reference);
        let record = ReferenceRecord {
            reference: reference.to_string(),
            descriptor: descriptor.clone(),
            pulled: seconds(SystemTime::now()),
        };
        let text = serde_json::to_vec(&record)
            .map_err(|e| ImageStoreError::io("write", &path, io::Error::other(e)))?;
        self.write_durably(&path, &text)
    }

    /// Updates the time of last use of `reference`.
    pub fn touch(&self, reference: &Reference) {
        let now = FileTimes::new().set_modified(SystemTime::now());
        // Fails harmlessly for a read-only store.
        let _ = File::options()
            .append(true)
            .open(self.record_path(reference))
            .and_then(|file| file.set_times(now));
    }

    /// Removes a reference and returns the removed names. Its blobs stay until garbage collection. A reference with only a
    /// digest removes all names of that image in its repository.
    pub fn remove(&self, reference: &Reference) -> Result<Vec<Reference>, ImageStoreError> {
        let mut names = vec![reference.clone()];
        if let (Some(digest), None) = (reference.digest(), reference.tag()) {
            let records = self.records()?.into_iter();
            let same = records.filter(|(record, _)| record.descriptor.digest == digest);
            let others = same.filter_map(|(record, _)| record.reference.parse::<Reference>().ok());
            names.extend(others.filter(|name| name.name() == reference.name()));
        }
        let mut removed = Vec::new();
        for name in names {
            if self.remove_reference_file(&name)? {
                removed.push(name);
            }
        }
        Ok(removed)
    }

    pub(super) fn remove_reference_file(
        &self,
        reference: &Reference,
    ) -> Result<bool, ImageStoreError> {
        let path = self.record_path(reference);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(ImageStoreError::io("remove", &path, error)),
        }
    }

    /// All references, sorted by name.
    pub fn list(&self) -> Result<Vec<ImageSummary>, ImageStoreError> {
        let mut all = Vec::new();
        for (record, used) in self.records()? {
            let image = self.image(&record.descriptor).unwrap_or(None);
            let complete = image
                .as_ref()
                .is_some_and(|image| image.manifest.blobs().all(|blob| self.has(blob)));
            all.push(ImageSummary {
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
    pub(super) fn records(&self) -> Result<Vec<(ReferenceRecord, SystemTime)>, ImageStoreError> {
        let dir = self.references();
        let failed = |e| ImageStoreError::io("list", &dir, e);
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

    /// `None` if the file is missing or is not a record of this store.
    fn read_record(
        &self,
        path: &std::path::Path,
    ) -> Result<Option<ReferenceRecord>, ImageStoreError> {
        match fs::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ImageStoreError::io("read", path, error)),
        }
    }
}

pub(super) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
