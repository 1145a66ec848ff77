//! Image garbage collection, as in upstream's kubelet: removes unpacked layers that no pod uses when the node's disk fills up.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use images::Layers;
use rustix::thread::UnshareFlags;

use crate::node_dir;

/// Overrides [`Settings`], as in `high=85,low=80,age=2m,every=5m`.
const VARIABLE: &str = "CORACLE_IMAGE_GC";

/// Thresholds and intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Disk usage in percent that starts garbage collection (`imageGCHighThresholdPercent`).
    high: u64,
    /// Disk usage in percent at which it stops (`imageGCLowThresholdPercent`).
    low: u64,
    /// Layers used more recently than this are kept (`imageMinimumGCAge`).
    age: Duration,
    /// The interval of checks.
    every: Duration,
}

impl Default for Settings {
    /// Upstream's defaults.
    fn default() -> Self {
        Self {
            high: 85,
            low: 80,
            age: Duration::from_secs(120),
            every: Duration::from_secs(300),
        }
    }
}

impl FromStr for Settings {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut settings = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (number, unit) = match value.strip_suffix('m') {
                Some(minutes) => (minutes, 60),
                None => (value.strip_suffix('s').unwrap_or(value), 1),
            };
            let number: u64 = number.parse().ok().with_context(|| {
                format!("{VARIABLE}: {part:?} is not like high=85, low=80, age=2m or every=5m")
            })?;
            let time = Duration::from_secs(number.saturating_mul(unit));
            match name {
                "high" => settings.high = number,
                "low" => settings.low = number,
                "age" => settings.age = time,
                "every" => settings.every = time.max(Duration::from_secs(1)),
                other => bail!("{VARIABLE} has no {other:?}"),
            }
        }
        if settings.low > settings.high || settings.high > 100 {
            bail!("{VARIABLE}: low must not be above high, nor high above 100");
        }
        Ok(settings)
    }
}

/// Reads [`VARIABLE`].
pub fn settings() -> anyhow::Result<Settings> {
    std::env::var(VARIABLE).unwrap_or_default().parse()
}

/// Checks disk usage periodically, and never returns.
pub async fn look_after(node_dir: PathBuf, settings: Settings) {
    let layers = node_dir::layers(&node_dir);
    loop {
        tokio::time::sleep(settings.every).await;
        if used_percent(&node_dir).is_none_or(|used| used < settings.high) || !layers.exists() {
            continue;
        }
        match free_elsewhere(&layers, settings).await {
            Ok(words) => tracing::info!(words, "the disk fills up"),
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "cannot remove unused images");
            }
        }
    }
}

/// Runs `coracle internal free-layers`: the files belong to ids of the node's user namespace, which this process cannot enter.
async fn free_elsewhere(layers: &Path, settings: Settings) -> anyhow::Result<String> {
    let output = tokio::process::Command::new("/proc/self/exe")
        .args(["internal", "free-layers"])
        .arg(layers)
        .arg(settings.low.to_string())
        .arg(settings.age.as_secs().to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// `coracle internal free-layers`: removes unused layers until disk usage is at most `low` percent.
pub fn free(layers: &Path, low: u64, age: Duration) -> anyhow::Result<ExitCode> {
    linux::namespace::enter_as_root(UnshareFlags::empty())?;
    let enough = || used_percent(layers).is_none_or(|used| used <= low);
    let gone = Layers::open(layers)?.prune_until(age, enough)?;
    use std::io::Write;
    writeln!(std::io::stdout(), "{gone} layers removed")?;
    Ok(ExitCode::SUCCESS)
}

/// Disk usage in percent as upstream counts it; `None` if it is unknown.
fn used_percent(dir: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(dir).ok()?;
    let free = found
        .f_bavail
        .saturating_mul(100)
        .checked_div(found.f_blocks)?;
    Some(100_u64.saturating_sub(free))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_settings() {
        let read = |text: &str| text.parse::<Settings>();
        assert_eq!(read("").unwrap(), Settings::default());
        assert_eq!(
            read("high=50,low=0,age=0,every=1s").unwrap(),
            Settings {
                high: 50,
                low: 0,
                age: Duration::ZERO,
                every: Duration::from_secs(1),
            }
        );
        assert_eq!(read("age=3m").unwrap().age, Duration::from_secs(180));
        for bad in ["high", "low=90", "high=101", "size=1", "age=soon"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn usage_is_at_most_100_percent() {
        assert!(used_percent(Path::new("/")).is_some_and(|used| used <= 100));
        assert_eq!(used_percent(Path::new("/no/such/place")), None);
    }
}
