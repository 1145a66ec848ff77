//! Access control: a requester may use a blob of the store if it has obtained the same bytes from a registry before.
//!
//! Pods of all namespaces share the store, and the author of a manifest or configuration chooses the digests in it. So
//! neither the presence of a blob nor a registry that names its digest proves that a pod may have the blob. Each blob has an
//! access record, which lists per repository to which requesters a registry sent it: to all, or to holders of a secret. The record
//! of a manifest is written last and covers all blobs of the image. Without a record no access is granted; blobs that the
//! user loads from an archive are open to all pods.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::gc::is_recent;
use super::{ImageStore, ImageStoreError};
use crate::reference::Reference;
use crate::registry::{RegistryCredential, RegistrySecret};
use download::Digest;

/// The number of secrets in a blob's record for one repository. The oldest are dropped, and their holders download again.
const MAX_SECRETS: usize = 100;

/// The pod, or user, on whose behalf an image is pulled.
#[derive(Debug)]
pub struct Requester {
    /// The repository of the requested image.
    repository: String,
    /// All secrets that the requester holds.
    secrets: Vec<RegistrySecret>,
}

/// The requesters to which a registry sends a blob or document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// All pods: the request needed no pod's secret.
    Public,
    /// Holders of this secret.
    Holder(RegistrySecret),
}

/// The access record of one blob.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AccessRecord {
    /// The user has loaded the blob: it may be used under every name.
    #[serde(default)]
    loaded: bool,
    /// The requesters to which each repository has sent the blob. Older versions wrote another field, which is not trusted.
    #[serde(default)]
    sent_by: BTreeMap<String, RepositoryAccess>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RepositoryAccess {
    /// No pod's secret was needed.
    #[serde(default, rename = "everybody")]
    public: bool,
    /// Fingerprints of the secrets that were used, latest last.
    #[serde(default)]
    secrets: Vec<Digest>,
}

impl Requester {
    /// A requester of `reference` that holds `credentials`, which may be for any registry.
    pub fn new(reference: &Reference, credentials: &[RegistryCredential]) -> Requester {
        Requester {
            repository: reference.name(),
            secrets: credentials
                .iter()
                .map(|credential| credential.secret.clone())
                .collect(),
        }
    }

    /// The repository of the requested image.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Whether the requester holds no secret.
    pub fn is_anonymous(&self) -> bool {
        self.secrets.is_empty()
    }

    /// Requesters of one scope have the same permissions on a registry, so they may resume each other's downloads.
    pub(super) fn scope(&self) -> Digest {
        let fingerprints = self
            .secrets
            .iter()
            .map(|secret| secret.fingerprint(&self.repository));
        let mut parts: Vec<_> = fingerprints.map(|fingerprint| fingerprint.hex()).collect();
        parts.sort();
        parts.insert(0, self.repository.clone());
        Digest::of(parts.join("\0").as_bytes())
    }

    /// The grant by which `access` to `repository` includes the requester.
    fn grant_in(&self, repository: &str, access: &RepositoryAccess) -> Option<Grant> {
        if access.public {
            return Some(Grant::Public);
        }
        let own = self
            .secrets
            .iter()
            .find(|secret| access.secrets.contains(&secret.fingerprint(repository)));
        own.cloned().map(Grant::Holder)
    }
}

impl Grant {
    /// The grant that covers all of `grants`: the secret if one was needed. `None` if several secrets were needed, since no
    /// single holder has access then.
    pub fn combined(grants: &[Grant]) -> Option<Grant> {
        let mut needed = Grant::Public;
        for grant in grants {
            match (&needed, grant) {
                (_, Grant::Public) => {}
                (Grant::Public, holder) => needed = holder.clone(),
                (one, other) if one == other => {}
                _ => return None,
            }
        }
        Some(needed)
    }
}

impl ImageStore {
    /// Whether the requester may use a manifest or index, and all blobs of a manifest, without asking a registry: the user
    /// loaded it, or the requester's repository has sent it to an equivalent requester before.
    pub fn may_use(
        &self,
        document: Digest,
        requester: &Requester,
    ) -> Result<bool, ImageStoreError> {
        let record = self.access_record(document)?;
        let access = record.sent_by.get(&requester.repository);
        Ok(record.loaded
            || access
                .is_some_and(|access| requester.grant_in(&requester.repository, access).is_some()))
    }

    /// The grant by which the requester could have obtained a layer or configuration from any repository. Using the stored
    /// copy then discloses nothing new.
    pub fn blob_grant(
        &self,
        blob: Digest,
        requester: &Requester,
    ) -> Result<Option<Grant>, ImageStoreError> {
        let record = self.access_record(blob)?;
        if record.loaded {
            return Ok(Some(Grant::Public));
        }
        let all = record.sent_by.iter();
        let grants: Vec<_> = all
            .filter_map(|(repository, access)| requester.grant_in(repository, access))
            .collect();
        let is_public = grants.contains(&Grant::Public);
        Ok(match is_public {
            true => Some(Grant::Public),
            false => grants.into_iter().next(),
        })
    }

    /// Records that a repository has sent a blob under `grant`. For a manifest this covers all blobs of the image.
    pub fn grant(
        &self,
        blob: Digest,
        repository: &str,
        grant: &Grant,
    ) -> Result<(), ImageStoreError> {
        let mut record = self.access_record(blob)?;
        let access = record.sent_by.entry(repository.to_owned()).or_default();
        match grant {
            Grant::Public if access.public => return Ok(()),
            Grant::Public => access.public = true,
            Grant::Holder(secret) => {
                let fingerprint = secret.fingerprint(repository);
                if access.secrets.contains(&fingerprint) {
                    return Ok(());
                }
                access.secrets.push(fingerprint);
                let excess = access.secrets.len().saturating_sub(MAX_SECRETS);
                access.secrets.drain(..excess);
            }
        }
        self.write_access(blob, &record)
    }

    /// Records that the user has loaded a blob, which opens it to all pods.
    pub fn grant_loaded(&self, blob: Digest) -> Result<(), ImageStoreError> {
        let mut record = self.access_record(blob)?;
        if record.loaded {
            return Ok(());
        }
        record.loaded = true;
        self.write_access(blob, &record)
    }

    /// Whether all pods may use a blob.
    pub fn is_public(&self, blob: Digest) -> Result<bool, ImageStoreError> {
        let record = self.access_record(blob)?;
        Ok(record.loaded || record.sent_by.values().any(|access| access.public))
    }

    /// Removes the records of missing blobs; a failure only wastes space. Without an exclusive lock a pull may be about to add
    /// the blob, so recent records stay.
    pub(super) fn prune_access_records(&self, is_exclusive: bool) {
        for entry in fs::read_dir(self.access()).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let digest = name.and_then(Digest::from_hex);
            if digest.is_some_and(|digest| !self.blob_path(digest).exists())
                && (is_exclusive || !is_recent(&path))
            {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// A missing or unreadable record grants no access.
    fn access_record(&self, blob: Digest) -> Result<AccessRecord, ImageStoreError> {
        let path = self.access_path(blob);
        match fs::read(&path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(AccessRecord::default()),
            Err(error) => Err(ImageStoreError::io("read", &path, error)),
        }
    }

    /// One of two concurrent writes may be lost, as in a crash. Its requester then downloads the blob again.
    fn write_access(&self, blob: Digest, record: &AccessRecord) -> Result<(), ImageStoreError> {
        let (dir, path) = (self.access(), self.access_path(blob));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| ImageStoreError::io("create directory", &dir, e))?;
        let text = serde_json::to_vec(record)
            .map_err(|e| ImageStoreError::io("write", &path, io::Error::other(e)))?;
        self.write_unsynced(&path, &text)
    }

    fn access_path(&self, blob: Digest) -> PathBuf {
        self.access().join(format!("{}.json", blob.hex()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, ImageStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = ImageStore::open(dir.path()).unwrap();
        (dir, store)
    }

    fn secret(number: usize) -> RegistrySecret {
        RegistrySecret::RegistryToken(format!("token {number}"))
    }

    fn requester(reference: &str, secrets: &[usize]) -> Requester {
        let credential = |number: &usize| RegistryCredential {
            pattern: "any".to_owned(),
            secret: secret(*number),
        };
        let credentials: Vec<_> = secrets.iter().map(credential).collect();
        Requester::new(&reference.parse().unwrap(), &credentials)
    }

    #[test]
    fn records_of_missing_blobs_are_removed() {
        let (_dir, store) = store();
        let blob = Digest::of(b"config");
        let is_known = || store.access_path(blob).exists();
        // Without locks, a pull may still be running.
        store.grant(blob, "r.example/a", &Grant::Public).unwrap();
        store.prune_access_records(false);
        assert!(is_known());
        store.prune_access_records(true);
        assert!(!is_known());
        store.put(b"config").unwrap();
        store.grant(blob, "r.example/a", &Grant::Public).unwrap();
        store.prune_access_records(true);
        assert!(is_known());
    }

    #[test]
    fn document_access_is_per_repository() {
        let (_dir, store) = store();
        let blob = Digest::of(b"blob");
        let (holder, other) = (
            requester("r.example/a", &[7, 1]),
            requester("r.example/a", &[2]),
        );
        let elsewhere = requester("r.example/b", &[1]);
        let all = [&holder, &other, &elsewhere];
        let may = |store: &ImageStore| all.map(|one| store.may_use(blob, one).unwrap());
        let grants = |store: &ImageStore| all.map(|one| store.blob_grant(blob, one).unwrap());
        assert_eq!(may(&store), [false; 3]);
        assert_eq!(grants(&store), [None, None, None]);
        let own = Grant::Holder(secret(1));
        store.grant(blob, "r.example/a", &own).unwrap();
        assert_eq!(may(&store), [true, false, false]);
        assert_eq!(grants(&store), [Some(own.clone()), None, Some(own)]);
        store.grant(blob, "r.example/a", &Grant::Public).unwrap();
        assert_eq!(may(&store), [true, true, false]);
        assert_eq!(grants(&store), [const { Some(Grant::Public) }; 3]);
        store.grant_loaded(blob).unwrap();
        assert_eq!(may(&store), [true; 3]);
    }

    #[test]
    fn damaged_and_old_records_grant_nothing() {
        let (_dir, store) = store();
        let (blob, anonymous) = (Digest::of(b"blob"), requester("r.example/a", &[]));
        store.grant(blob, "r.example/a", &Grant::Public).unwrap();
        assert!(store.may_use(blob, &anonymous).unwrap());
        let old = r#"{"repositories":{"r.example/a":{"public":true,"secrets":[]}}}"#;
        for unusable in ["{", "", old] {
            fs::write(store.access_path(blob), unusable).unwrap();
            assert!(!store.may_use(blob, &anonymous).unwrap(), "{unusable}");
            assert_eq!(store.blob_grant(blob, &anonymous).unwrap(), None);
        }
    }

    #[test]
    fn oldest_secrets_are_dropped() {
        let (_dir, store) = store();
        let blob = Digest::of(b"blob");
        for number in 0..=MAX_SECRETS {
            let grant = Grant::Holder(secret(number));
            store.grant(blob, "r.example/a", &grant).unwrap();
        }
        let may = |number| {
            store
                .may_use(blob, &requester("r.example/a", &[number]))
                .unwrap()
        };
        assert!(!may(0) && may(1) && may(MAX_SECRETS));
    }

    #[test]
    fn grants_of_several_secrets_do_not_combine() {
        let (all, one, two) = (
            Grant::Public,
            Grant::Holder(secret(1)),
            Grant::Holder(secret(2)),
        );
        let combined = |grants: &[&Grant]| {
            let grants: Vec<_> = grants.iter().map(|grant| (*grant).clone()).collect();
            Grant::combined(&grants)
        };
        assert_eq!(combined(&[&all, &all]), Some(all.clone()));
        assert_eq!(combined(&[&all, &one, &all, &one]), Some(one.clone()));
        assert_eq!(combined(&[&one, &all, &two]), None);
    }

    #[test]
    fn scopes_differ_by_repository_and_secrets() {
        let scope = |reference: &str, secrets: &[usize]| requester(reference, secrets).scope();
        assert_eq!(
            scope("r.example/a:1", &[1, 2]),
            scope("r.example/a:2", &[2, 1])
        );
        assert_ne!(scope("r.example/a", &[1]), scope("r.example/a", &[2]));
        assert_ne!(scope("r.example/a", &[1]), scope("r.example/a", &[]));
        assert_ne!(scope("r.example/a", &[]), scope("r.example/b", &[]));
    }
}
