//! The images that pods of this node find without a registry, for the Node's status.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use images::{Reference, Store, Summary};
use k8s_openapi::api::core::v1::ContainerImage;

/// So many images and so many names of each, as upstream shows.
const MOST_IMAGES: usize = 50;
const MOST_NAMES: usize = 5;

/// A store's list, read again only when it has changed: the store is on a shared file system.
#[derive(Default)]
pub struct ImageList(Mutex<Option<(SystemTime, Vec<ContainerImage>)>>);

impl ImageList {
    /// What is in the store now.
    pub async fn read(&self, store: &Path) -> Vec<ContainerImage> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = std::fs::metadata(store.join("references")).and_then(|dir| dir.modified());
        let Ok(changed) = changed else {
            // Nobody has put anything there.
            return Vec::new();
        };
        if let Some((at, list)) = known().as_ref()
            && *at == changed
        {
            return list.clone();
        }
        let store: PathBuf = store.to_owned();
        let read = tokio::task::spawn_blocking(move || Store::open(&store)?.list()).await;
        match read {
            Ok(Ok(found)) => {
                let list = shown(found);
                *known() = Some((changed, list.clone()));
                list
            }
            Ok(Err(error)) => {
                tracing::debug!(error = images::causes(&error), "cannot list the images");
                Vec::new()
            }
            Err(_) => Vec::new(),
        }
    }
}

/// The largest first; one with several names once.
fn shown(found: Vec<Summary>) -> Vec<ContainerImage> {
    let mut by_digest: BTreeMap<String, (u64, Vec<String>)> = BTreeMap::new();
    for summary in found.into_iter().filter(|summary| summary.complete) {
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
    let mut all: Vec<_> = by_digest.into_values().collect();
    all.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    let images = all.into_iter().take(MOST_IMAGES).map(|(size, mut names)| {
        names.truncate(MOST_NAMES);
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
    fn names_of_one_image_are_together() {
        let summary = |reference: &str, digit: char, size, complete| Summary {
            reference: reference.to_owned(),
            digest: format!("sha256:{}", digit.to_string().repeat(64))
                .parse()
                .unwrap(),
            size,
            pulled: 0,
            used: 0,
            complete,
        };
        let list = shown(vec![
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
}
