//! Garbage collection: removes references by age and size, then unreferenced blobs.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::blob::TEMP_PREFIX;
use super::{ImageStore, ImageStoreError};
use crate::manifest::{Descriptor, Document};
use crate::reference::Reference;
use download::Digest;

/// If the file system has no locks, a pull may be running, so files younger than this are kept.
const RECENT: Duration = Duration::from_secs(24 * 3600);

/// Timeout for the exclusive lock, which running pulls delay.
const STORE_LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a garbage collection.
#[derive(Debug, Clone, Default)]
pub struct PruneOptions {
    /// Remove references that were not used for this long.
    pub older_than: Option<Duration>,
    /// Keep references, most recently used first, as long as their blobs together have at most this size. Remove those that do not
    /// fit.
    pub keep_bytes: Option<u64>,
    /// Only report, remove nothing.
    pub dry_run: bool,
}

/// The result of a garbage collection.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct PruneReport {
    /// The removed references.
    pub references: Vec<String>,
    /// The number of removed blobs.
    pub blobs: u64,
    /// The number of freed bytes.
    pub bytes: u64,
}

/// A reference and its blobs.
struct Root {
    reference: String,
    used: SystemTime,
    blobs: HashSet<Digest>,
}

impl ImageStore {
    /// Removes the references that `options` selects, and all unreferenced blobs. Waits for running pulls.
    pub async fn prune(&self, options: &PruneOptions) -> Result<PruneReport, ImageStoreError> {
        let lock = self.lock_exclusive(STORE_LOCK_TIMEOUT).await?;
        let mut roots = self.roots()?;
        roots.sort_by_key(|root| std::cmp::Reverse(root.used));
        let blob_sizes = self.blob_sizes()?;
        let removed = options.select(&mut roots, &blob_sizes, SystemTime::now());
        let mut report = PruneReport::default();
        for root in removed {
            if let Ok(reference) = root.reference.parse::<Reference>()
                && !options.dry_run
            {
                self.remove_reference_file(&reference)?;
            }
            report.references.push(root.reference);
        }
        let needed: HashSet<Digest> = roots.into_iter().flat_map(|root| root.blobs).collect();
        for (digest, size) in blob_sizes {
            let path = self.blob_path(digest);
            if needed.contains(&digest) || (!lock.is_exclusive() && is_recent(&path)) {
                continue;
            }
            if !options.dry_run {
                fs::remove_file(&path).map_err(|e| ImageStoreError::io("remove", &path, e))?;
            }
            report.blobs += 1;
            report.bytes += size;
        }
        if !options.dry_run {
            self.prune_access_records(lock.is_exclusive());
            let is_exclusive = lock.is_exclusive();
            report.bytes += self.remove_partial_files(|path| is_exclusive || !is_recent(path));
        }
        report.references.sort();
        Ok(report)
    }

    fn roots(&self) -> Result<Vec<Root>, ImageStoreError> {
        let mut roots = Vec::new();
        for (record, used) in self.records()? {
            let mut blobs = HashSet::new();
            self.collect_reachable(&record.descriptor, &mut blobs, 3)?;
            roots.push(Root {
                reference: record.reference,
                used,
                blobs,
            });
        }
        Ok(roots)
    }

    /// Collects `top` and all blobs that it refers to, directly or through manifests. Most manifests of other platforms are not in
    /// the store, and are not followed.
    fn collect_reachable(
        &self,
        top: &Descriptor,
        blobs: &mut HashSet<Digest>,
        depth: u32,
    ) -> Result<(), ImageStoreError> {
        blobs.insert(top.digest);
        let Some(bytes) = self.read_document(top.digest)? else {
            return Ok(());
        };
        match Document::parse(&bytes, &top.media_type) {
            Ok(Document::Manifest(manifest)) => {
                blobs.extend(manifest.blobs().map(|blob| blob.digest));
            }
            Ok(Document::Index(index)) if depth > 0 => {
                for entry in &index.manifests {
                    self.collect_reachable(entry, blobs, depth - 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn blob_sizes(&self) -> Result<HashMap<Digest, u64>, ImageStoreError> {
        let dir = self.blobs();
        let failed = |e| ImageStoreError::io("list", &dir, e);
        let mut blob_sizes = HashMap::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let digest = entry.file_name().to_str().and_then(Digest::from_hex);
            if let (Some(digest), Ok(found)) = (digest, entry.metadata()) {
                blob_sizes.insert(digest, found.len());
            }
        }
        Ok(blob_sizes)
    }

    /// Removes temporary files of killed processes, but no partial downloads, which can be resumed. The caller holds the
    /// exclusive lock.
    pub(super) fn remove_temporary_files(&self) {
        self.remove_partial_files(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(TEMP_PREFIX))
        });
    }

    /// Removes leftovers of interrupted pulls. Returns the freed bytes; ignores failures, which only waste space.
    fn remove_partial_files(&self, is_removable: impl Fn(&Path) -> bool) -> u64 {
        let entries = fs::read_dir(self.partial()).into_iter().flatten().flatten();
        entries
            .filter(|entry| is_removable(&entry.path()))
            .filter_map(|entry| {
                let size = entry.metadata().ok()?.len();
                fs::remove_file(entry.path()).ok().map(|()| size)
            })
            .sum()
    }
}

impl PruneOptions {
    /// Moves the references to remove out of `roots`, which are sorted by last use, latest first.
    fn select(
        &self,
        roots: &mut Vec<Root>,
        blob_sizes: &HashMap<Digest, u64>,
        now: SystemTime,
    ) -> Vec<Root> {
        let mut removed = Vec::new();
        if let Some(age) = self.older_than {
            let old = |root: &mut Root| {
                now.duration_since(root.used)
                    .is_ok_and(|since| since >= age)
            };
            removed.extend(roots.extract_if(.., old));
        }
        if let Some(keep) = self.keep_bytes {
            // The most recently used references keep their blobs first; blobs shared with them count once.
            let (mut counted, mut total) = (HashSet::new(), 0);
            let over = |root: &mut Root| {
                let new = root.blobs.iter().filter(|blob| !counted.contains(*blob));
                let more: u64 = new.filter_map(|blob| blob_sizes.get(blob)).sum();
                if total + more > keep {
                    return true;
                }
                total += more;
                counted.extend(root.blobs.iter().copied());
                false
            };
            removed.extend(roots.extract_if(.., over));
        }
        removed
    }
}

pub(super) fn is_recent(path: &Path) -> bool {
    let modified = fs::metadata(path).and_then(|found| found.modified());
    modified.is_ok_and(|at| {
        SystemTime::now()
            .duration_since(at)
            .is_ok_and(|age| age < RECENT)
    })
}
