//! Garbage collection: references by age and size, then blobs that no reference needs.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::blob::UNFINISHED;
use super::{Store, StoreError};
use crate::digest::Digest;
use crate::manifest::{Descriptor, Document};
use crate::reference::Reference;

/// Where nobody can say whether somebody pulls, what is younger than this stays.
const YOUNG: Duration = Duration::from_secs(24 * 3600);

/// How long pulls under way are waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// What may go.
#[derive(Debug, Clone, Default)]
pub struct Prune {
    /// References that weren't used for so long.
    pub older_than: Option<Duration>,
    /// References, least recently used first, until all blobs together are at most so large.
    pub keep_bytes: Option<u64>,
    /// Only say what would go.
    pub dry_run: bool,
}

/// What went.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Collected {
    /// The references.
    pub references: Vec<String>,
    /// How many blobs.
    pub blobs: u64,
    /// How large they were.
    pub bytes: u64,
}

/// A reference, and the blobs that it needs.
struct Root {
    reference: String,
    used: SystemTime,
    blobs: HashSet<Digest>,
}

impl Store {
    /// Removes what `what` names, and all blobs that nothing needs. Waits for pulls that are under way.
    pub async fn prune(&self, what: &Prune) -> Result<Collected, StoreError> {
        let alone = self.alone(PATIENCE).await?;
        let mut roots = self.roots()?;
        roots.sort_by_key(|root| std::cmp::Reverse(root.used));
        let sizes = self.sizes()?;
        let gone = what.choose(&mut roots, &sizes, SystemTime::now());
        let mut collected = Collected::default();
        for root in gone {
            if let Ok(reference) = root.reference.parse::<Reference>()
                && !what.dry_run
            {
                self.forget_name(&reference)?;
            }
            collected.references.push(root.reference);
        }
        let needed: HashSet<Digest> = roots.into_iter().flat_map(|root| root.blobs).collect();
        for (digest, size) in sizes {
            let path = self.blob_path(digest);
            if needed.contains(&digest) || (!alone.certain() && young(&path)) {
                continue;
            }
            if !what.dry_run {
                fs::remove_file(&path).map_err(|e| StoreError::io("remove", &path, e))?;
            }
            collected.blobs += 1;
            collected.bytes += size;
        }
        if !what.dry_run {
            self.forget_access(alone.certain());
            let certain = alone.certain();
            collected.bytes += self.sweep_partial(|path| certain || !young(path));
        }
        collected.references.sort();
        Ok(collected)
    }

    fn roots(&self) -> Result<Vec<Root>, StoreError> {
        let mut roots = Vec::new();
        for (record, used) in self.records()? {
            let mut blobs = HashSet::new();
            self.reach(&record.descriptor, &mut blobs, 3)?;
            roots.push(Root {
                reference: record.reference,
                used,
                blobs,
            });
        }
        Ok(roots)
    }

    /// Collects everything below `top`. Of an index only what is here was ever wanted.
    fn reach(
        &self,
        top: &Descriptor,
        blobs: &mut HashSet<Digest>,
        depth: u32,
    ) -> Result<(), StoreError> {
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
                    self.reach(entry, blobs, depth - 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn sizes(&self) -> Result<HashMap<Digest, u64>, StoreError> {
        let dir = self.blobs();
        let failed = |e| StoreError::io("list", &dir, e);
        let mut sizes = HashMap::new();
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let digest = entry.file_name().to_str().and_then(Digest::from_hex);
            if let (Some(digest), Ok(found)) = (digest, entry.metadata()) {
                sizes.insert(digest, found.len());
            }
        }
        Ok(sizes)
    }

    /// Removes what processes that died have not written to its end, but no download that can be resumed. To be called by who
    /// is alone.
    pub(super) fn sweep_unfinished(&self) {
        self.sweep_partial(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(UNFINISHED))
        });
    }

    /// Removes what broken pulls left; what can't be removed only takes room.
    fn sweep_partial(&self, unwanted: impl Fn(&Path) -> bool) -> u64 {
        let entries = fs::read_dir(self.partial()).into_iter().flatten().flatten();
        entries
            .filter(|entry| unwanted(&entry.path()))
            .filter_map(|entry| {
                let size = entry.metadata().ok()?.len();
                fs::remove_file(entry.path()).ok().map(|()| size)
            })
            .sum()
    }
}

impl Prune {
    /// Takes the references that go out of `roots`, which are sorted by use, the latest first.
    fn choose(
        &self,
        roots: &mut Vec<Root>,
        sizes: &HashMap<Digest, u64>,
        now: SystemTime,
    ) -> Vec<Root> {
        let mut gone = Vec::new();
        if let Some(age) = self.older_than {
            let old = |root: &mut Root| {
                now.duration_since(root.used)
                    .is_ok_and(|since| since >= age)
            };
            gone.extend(roots.extract_if(.., old));
        }
        if let Some(keep) = self.keep_bytes {
            // The more recently used have the first call on the room; layers shared with them cost nothing.
            let (mut counted, mut total) = (HashSet::new(), 0);
            let over = |root: &mut Root| {
                let new = root.blobs.iter().filter(|blob| !counted.contains(*blob));
                let more: u64 = new.filter_map(|blob| sizes.get(blob)).sum();
                if total + more > keep {
                    return true;
                }
                total += more;
                counted.extend(root.blobs.iter().copied());
                false
            };
            gone.extend(roots.extract_if(.., over));
        }
        gone
    }
}

pub(super) fn young(path: &Path) -> bool {
    let modified = fs::metadata(path).and_then(|found| found.modified());
    modified.is_ok_and(|at| {
        SystemTime::now()
            .duration_since(at)
            .is_ok_and(|age| age < YOUNG)
    })
}
