//! The images that pods of this node can use without a registry, for `status.images` of the Node.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use images::{ImageStore, ImageSummary, Reference};
use k8s_openapi::api::core::v1::ContainerImage;
use tokio::sync::Semaphore;

/// Limits of upstream's kubelet (`nodeStatusMaxImages`, `MaxNamesPerImageInNodeStatus`).
const MAX_IMAGES: usize = 50;
const MAX_NAMES_PER_IMAGE: usize = 5;

/// Time-out of reading the store. It is on a shared file system, which may hang.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Cached list of a store's images, read again only when the store has changed.
pub struct ImageList {
    cache: Arc<Mutex<CachedImages>>,
    /// Held by the thread that reads the store, so that at most one thread hangs.
    read_permit: Arc<Semaphore>,
}

/// The images, and the modification time of the store for which they are valid.
type CachedImages = Option<(SystemTime, Vec<ContainerImage>)>;

impl Default for ImageList {
    fn default() -> Self {
        Self {
            cache: Arc::default(),
            read_permit: Arc::new(Semaphore::new(1)),
        }
    }
}

impl ImageList {
    /// The images in the store; after a time-out, the cached ones.
    pub async fn read(&self, store: &Path) -> Vec<ContainerImage> {
        if let Ok(read_permit) = Arc::clone(&self.read_permit).try_acquire_owned() {
            let (store, cache) = (store.to_owned(), Arc::clone(&self.cache));
            let refreshed = tokio::task::spawn_blocking(move || {
                refresh(&store, &cache);
                drop(read_permit);
            });
            let _ = tokio::time::timeout(READ_TIMEOUT, refreshed).await;
        }
        let cache = self.cache.lock().unwrap();
        cache
            .as_ref()
            .map_or_else(Vec::new, |(_, list)| list.clone())
    }
}

fn refresh(store: &Path, cache: &Mutex<CachedImages>) {
    let changed = std::fs::metadata(store.join("references")).and_then(|dir| dir.modified());
    let Ok(changed) = changed else {
        // The store is empty.
        *cache.lock().unwrap() = None;
        return;
    };
    let is_current = |(at, _): &(SystemTime, _)| *at == changed;
    if cache.lock().unwrap().as_ref().is_some_and(is_current) {
        return;
    }
    let summaries = ImageStore::open(store).and_then(|store| store.list());
    *cache.lock().unwrap() = match summaries {
        Ok(summaries) => Some((changed, container_images(summaries))),
        Err(error) => {
            tracing::debug!(
                error = images::error_chain(&error),
                "cannot list the images"
            );
            None
        }
    };
}

/// Merges the names of each image and sorts by size, largest first.
fn container_images(summaries: Vec<ImageSummary>) -> Vec<ContainerImage> {
    let mut by_digest: BTreeMap<String, (u64, Vec<String>)> = BTreeMap::new();
    for summary in summaries.into_iter().filter(|summary| summary.complete) {
        let (size, names) = by_digest.entry(summary.digest.to_string()).or_default();
        *size = summary.size;
        let reference = summary.reference.parse::<Reference>();
        let pinned = reference
            .map(|reference| reference.pinned(summary.digest))
            .ok();
        for name in pinned.into_iter().chain([summary.reference]) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let mut images: Vec<_> = by_digest.into_values().collect();
    images.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    let images = images
        .into_iter()
        .take(MAX_IMAGES)
        .map(|(size, mut names)| {
            names.truncate(MAX_NAMES_PER_IMAGE);
            ContainerImage {
                names: Some(names),
                size_bytes: i64::try_from(size).ok(),
            }
        });
    images.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_image_are_merged() {
        let summary = |reference: &str, digit: char, size, complete| ImageSummary {
            reference: reference.to_owned(),
            digest: format!("sha256:{}", digit.to_string().repeat(64))
                .parse()
                .unwrap(),
            size,
            pulled: 0,
            used: 0,
            complete,
        };
        let list = container_images(vec![
            summary("a.example/small:1", '1', 10, true),
            summary("a.example/large:1", '2', 20, true),
            summary("a.example/large:2", '2', 20, true),
            summary("a.example/half:1", '3', 30, false),
        ]);
        let names = |at: usize| list[at].names.clone().unwrap();
        assert_eq!(list.len(), 2);
        assert_eq!(list[0].size_bytes, Some(20));
        assert_eq!(
            names(0),
            [
                format!("a.example/large@sha256:{}", "2".repeat(64)),
                "a.example/large:1".to_owned(),
                "a.example/large:2".to_owned(),
            ]
        );
        assert_eq!(names(1).len(), 2);
    }

    #[tokio::test]
    async fn hanging_store_does_not_block_the_reader() {
        let home = tempfile::tempdir().unwrap();
        let list = ImageList::default();
        assert!(list.read(home.path()).await.is_empty());
        let image = ContainerImage::default();
        *list.cache.lock().unwrap() = Some((SystemTime::UNIX_EPOCH, vec![image.clone()]));
        // Another thread still reads the store.
        let read_permit = Arc::clone(&list.read_permit).try_acquire_owned().unwrap();
        assert_eq!(list.read(home.path()).await, [image]);
        drop(read_permit);
        assert!(list.read(home.path()).await.is_empty());
    }
}
