//! Who may use what is in the store: whoever has obtained the same bytes from a registry before.
//!
//! The store is shared by the pods of all namespaces, and every digest in a manifest or configuration is chosen by whoever
//! wrote it. So neither that a blob is here nor that a registry names its digest says that a pod may have it. Each blob has
//! an access record, which lists by repository whom a registry sent it to: everybody, or the holders of a secret. The record of a
//! manifest is written last and covers everything that the manifest names. A blob without a record is for nobody; what the user loads
//! from an archive is for everybody.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::gc::young;
use super::{Store, StoreError};
use crate::digest::Digest;
use crate::reference::Reference;
use crate::registry::{Credential, Secret};

/// The number of secrets that are remembered for a blob in one repository; the oldest are forgotten, and their holders
/// download again.
const MAX_SECRETS: usize = 100;

/// Who asks for an image.
#[derive(Debug)]
pub struct Requester {
    /// The repository of the image that it names.
    repository: String,
    /// All secrets that it holds.
    secrets: Vec<Secret>,
}

/// Whom a registry sends something to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// Pods without a secret of their own.
    Everybody,
    /// Holders of this secret.
    Holder(Secret),
}

/// Of one blob: who has obtained it.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AccessRecord {
    /// The user has loaded it: it may be used under every name.
    #[serde(default)]
    loaded: bool,
    /// Whom registries have sent it to. Records of before were by image, and not to be trusted; they have another field.
    #[serde(default)]
    sent_by: BTreeMap<String, Access>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Access {
    /// No secret of a pod was needed.
    #[serde(default)]
    everybody: bool,
    /// Marks of the secrets that were, the latest last.
    #[serde(default)]
    secrets: Vec<Digest>,
}

impl Requester {
    /// Somebody who holds `credentials`, whatever registries they are for, and wants `reference`.
    pub fn new(reference: &Reference, credentials: &[Credential]) -> Requester {
        Requester {
            repository: reference.name(),
            secrets: credentials.iter().map(|one| one.secret.clone()).collect(),
        }
    }

    /// The repository of the image that it names.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Whether it holds no secret.
    pub fn is_anonymous(&self) -> bool {
        self.secrets.is_empty()
    }

    /// Requesters of one scope have the same rights at a registry, and may resume each other's downloads.
    pub(super) fn scope(&self) -> Digest {
        let marks = self.secrets.iter().map(|one| one.mark(&self.repository));
        let mut words: Vec<_> = marks.map(|mark| mark.hex()).collect();
        words.sort();
        words.insert(0, self.repository.clone());
        Digest::of(words.join("\0").as_bytes())
    }

    /// Whether `access` to `repository` was given to the requester too.
    fn shares(&self, repository: &str, access: &Access) -> Option<Grant> {
        if access.everybody {
            return Some(Grant::Everybody);
        }
        let own = self
            .secrets
            .iter()
            .find(|one| access.secrets.contains(&one.mark(repository)));
        own.cloned().map(Grant::Holder)
    }
}

impl Grant {
    /// What parts that were obtained by these grants take together: a secret if one was needed. `None` if it was more than
    /// one, for no single holder has access then.
    pub fn combined(grants: &[Grant]) -> Option<Grant> {
        let mut needed = Grant::Everybody;
        for grant in grants {
            match (&needed, grant) {
                (_, Grant::Everybody) => {}
                (Grant::Everybody, holder) => needed = holder.clone(),
                (one, other) if one == other => {}
                _ => return None,
            }
        }
        Some(needed)
    }
}

impl Store {
    /// Whether the requester may use a manifest or index, and everything that a manifest names, without asking a registry: it
    /// was loaded, or the requester's repository has sent it to such a one before.
    pub fn may_use(&self, document: Digest, requester: &Requester) -> Result<bool, StoreError> {
        let record = self.access_record(document)?;
        let access = record.sent_by.get(&requester.repository);
        Ok(record.loaded
            || access
                .is_some_and(|access| requester.shares(&requester.repository, access).is_some()))
    }

    /// Whether the requester has, or could have, obtained a layer or configuration, from whichever repository: it learns
    /// nothing new from it then. Says what that takes.
    pub fn blob_grant(
        &self,
        blob: Digest,
        requester: &Requester,
    ) -> Result<Option<Grant>, StoreError> {
        let record = self.access_record(blob)?;
        if record.loaded {
            return Ok(Some(Grant::Everybody));
        }
        let all = record.sent_by.iter();
        let grants: Vec<_> = all
            .filter_map(|(repository, access)| requester.shares(repository, access))
            .collect();
        let open = grants.contains(&Grant::Everybody);
        Ok(match open {
            true => Some(Grant::Everybody),
            false => grants.into_iter().next(),
        })
    }

    /// Notes that a repository has sent a blob to whom `grant` says. For a manifest: everything that it names, too.
    pub fn grant(&self, blob: Digest, repository: &str, grant: &Grant) -> Result<(), StoreError> {
        let mut record = self.access_record(blob)?;
        let access = record.sent_by.entry(repository.to_owned()).or_default();
        match grant {
            Grant::Everybody if access.everybody => return Ok(()),
            Grant::Everybody => access.everybody = true,
            Grant::Holder(secret) => {
                let mark = secret.mark(repository);
                if access.secrets.contains(&mark) {
                    return Ok(());
                }
                access.secrets.push(mark);
                let surplus = access.secrets.len().saturating_sub(MAX_SECRETS);
                access.secrets.drain(..surplus);
            }
        }
        self.write_access(blob, &record)
    }

    /// Notes that the user has loaded a blob, which makes it everybody's.
    pub fn grant_loaded(&self, blob: Digest) -> Result<(), StoreError> {
        let mut record = self.access_record(blob)?;
        if record.loaded {
            return Ok(());
        }
        record.loaded = true;
        self.write_access(blob, &record)
    }

    /// Whether everybody may use a blob.
    pub fn is_open(&self, blob: Digest) -> Result<bool, StoreError> {
        let record = self.access_record(blob)?;
        Ok(record.loaded || record.sent_by.values().any(|access| access.everybody))
    }

    /// Removes the records of blobs that are gone; what can't be removed only takes room. Unless it is `certain` that nobody
    /// pulls, a blob may be about to come.
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

    /// A record that is missing or can't be understood lets nobody in.
    fn access_record(&self, blob: Digest) -> Result<AccessRecord, StoreError> {
        let path = self.access_path(blob);
        match fs::read(&path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(AccessRecord::default()),
            Err(error) => Err(StoreError::io("read", &path, error)),
        }
    }

    /// Of two that write one record at once, one is lost, as one may be by a crash: its requester downloads again.
    fn write_access(&self, blob: Digest, record: &AccessRecord) -> Result<(), StoreError> {
        let (dir, path) = (self.access(), self.access_path(blob));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| StoreError::io("make the directory", &dir, e))?;
        let text = serde_json::to_vec(record)
            .map_err(|e| StoreError::io("write", &path, io::Error::other(e)))?;
        self.write_unsynced(&path, &text)
    }

    fn access_path(&self, blob: Digest) -> PathBuf {
        self.access().join(format!("{}.json", blob.hex()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        (dir, store)
    }

    fn secret(number: usize) -> Secret {
        Secret::RegistryToken(format!("token {number}"))
    }

    fn requester(reference: &str, secrets: &[usize]) -> Requester {
        let credential = |number: &usize| Credential {
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
        // Under way: whether the pull still lives is not known without locks.
        store.grant(blob, "r.example/a", &Grant::Everybody).unwrap();
        store.forget_access(false);
        assert!(is_known());
        store.forget_access(true);
        assert!(!is_known());
        store.put(b"config").unwrap();
        store.grant(blob, "r.example/a", &Grant::Everybody).unwrap();
        store.forget_access(true);
        assert!(is_known());
    }

    #[test]
    fn documents_need_their_repository_and_blobs_any() {
        let (_dir, store) = store();
        let blob = Digest::of(b"blob");
        let (holder, other) = (
            requester("r.example/a", &[7, 1]),
            requester("r.example/a", &[2]),
        );
        let elsewhere = requester("r.example/b", &[1]);
        let all = [&holder, &other, &elsewhere];
        let may = |store: &Store| all.map(|one| store.may_use(blob, one).unwrap());
        let grants = |store: &Store| all.map(|one| store.blob_grant(blob, one).unwrap());
        assert_eq!(may(&store), [false; 3]);
        assert_eq!(grants(&store), [None, None, None]);
        let own = Grant::Holder(secret(1));
        store.grant(blob, "r.example/a", &own).unwrap();
        assert_eq!(may(&store), [true, false, false]);
        assert_eq!(grants(&store), [Some(own.clone()), None, Some(own)]);
        store.grant(blob, "r.example/a", &Grant::Everybody).unwrap();
        assert_eq!(may(&store), [true, true, false]);
        assert_eq!(grants(&store), [const { Some(Grant::Everybody) }; 3]);
        store.grant_loaded(blob).unwrap();
        assert_eq!(may(&store), [true; 3]);
    }

    #[test]
    fn damaged_and_old_records_grant_nothing() {
        let (_dir, store) = store();
        let (blob, anybody) = (Digest::of(b"blob"), requester("r.example/a", &[]));
        store.grant(blob, "r.example/a", &Grant::Everybody).unwrap();
        assert!(store.may_use(blob, &anybody).unwrap());
        let old = r#"{"repositories":{"r.example/a":{"everybody":true,"secrets":[]}}}"#;
        for unusable in ["{", "", old] {
            fs::write(store.access_path(blob), unusable).unwrap();
            assert!(!store.may_use(blob, &anybody).unwrap(), "{unusable}");
            assert_eq!(store.blob_grant(blob, &anybody).unwrap(), None);
        }
    }

    #[test]
    fn the_latest_secrets_are_kept() {
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
    fn parts_of_several_holders_are_nobodys() {
        let (all, one, two) = (
            Grant::Everybody,
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
