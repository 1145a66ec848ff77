//! Garbage collection of unpacked layers, as in upstream's kubelet: removes layers that are not in use when the disk fills up.

use std::path::Path;
use std::time::Duration;

use super::{LayerError, Layers};

/// Thresholds and intervals of garbage collection, named as in upstream's kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// Disk usage in percent that starts garbage collection (`imageGCHighThresholdPercent`).
    pub high_threshold_percent: u64,
    /// Disk usage in percent at which it stops (`imageGCLowThresholdPercent`).
    pub low_threshold_percent: u64,
    /// Layers used more recently than this are kept (`imageMinimumGCAge`).
    pub min_age: Duration,
    /// The interval of checks.
    pub interval: Duration,
}

impl Default for ImageGcPolicy {
    /// Upstream's defaults.
    fn default() -> Self {
        Self {
            high_threshold_percent: 85,
            low_threshold_percent: 80,
            min_age: Duration::from_secs(120),
            interval: Duration::from_secs(300),
        }
    }
}

impl ImageGcPolicy {
    /// Whether the file system of the layers in `dir` is full enough to remove some.
    pub fn is_due(&self, dir: &Path) -> bool {
        disk_usage_percent(dir).is_some_and(|used| used >= self.high_threshold_percent)
    }
}

impl Layers {
    /// Removes layers that were not used for `min_age` until disk usage is at most `low_threshold_percent`. Returns their
    /// number.
    pub fn collect_garbage(
        &self,
        low_threshold_percent: u64,
        min_age: Duration,
    ) -> Result<usize, LayerError> {
        let is_low =
            || disk_usage_percent(&self.dir).is_none_or(|used| used <= low_threshold_percent);
        self.prune_until(min_age, is_low)
    }
}

/// Disk usage in percent as upstream counts it; `None` if it is unknown.
fn disk_usage_percent(dir: &Path) -> Option<u64> {
    let file_system = rustix::fs::statvfs(dir).ok()?;
    let free = file_system
        .f_bavail
        .saturating_mul(100)
        .checked_div(file_system.f_blocks)?;
    Some(100_u64.saturating_sub(free))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_at_most_100_percent() {
        assert!(disk_usage_percent(Path::new("/")).is_some_and(|used| used <= 100));
        assert_eq!(disk_usage_percent(Path::new("/no/such/directory")), None);
    }

    #[test]
    fn layers_are_removed_between_the_thresholds() {
        let dir = tempfile::tempdir().unwrap();
        let layers = Layers::open(dir.path()).unwrap();
        std::fs::create_dir(dir.path().join("0".repeat(32))).unwrap();
        let at = |high_threshold_percent| ImageGcPolicy {
            high_threshold_percent,
            ..ImageGcPolicy::default()
        };
        assert!(at(0).is_due(dir.path()));
        assert!(!at(101).is_due(dir.path()));
        assert!(!at(0).is_due(&dir.path().join("missing")));
        assert_eq!(layers.collect_garbage(100, Duration::ZERO).unwrap(), 0);
        assert_eq!(
            layers.collect_garbage(0, Duration::from_secs(60)).unwrap(),
            0
        );
        assert_eq!(layers.collect_garbage(0, Duration::ZERO).unwrap(), 1);
    }
}
