//! The policy of image garbage collection.

use std::time::Duration;

use anyhow::{Context, bail};
use images::ImageGcPolicy;

/// Overrides the defaults, as in `high=85,low=80,age=2m,every=5m`.
const IMAGE_GC_VARIABLE: &str = "CORACLE_IMAGE_GC";

/// The policy from the environment, or the default.
pub fn from_environment() -> anyhow::Result<ImageGcPolicy> {
    parse(&std::env::var(IMAGE_GC_VARIABLE).unwrap_or_default())
}

fn parse(text: &str) -> anyhow::Result<ImageGcPolicy> {
    let mut policy = ImageGcPolicy::default();
    for (part, name, value) in super::pairs(text) {
        let (number, unit) = match value.strip_suffix('m') {
            Some(minutes) => (minutes, 60),
            None => (value.strip_suffix('s').unwrap_or(value), 1),
        };
        let number: u64 = number.parse().ok().with_context(|| {
            format!("{IMAGE_GC_VARIABLE}: {part:?} is not like high=85, low=80, age=2m or every=5m")
        })?;
        let time = Duration::from_secs(number.saturating_mul(unit));
        match name {
            "high" => policy.high_threshold_percent = number,
            "low" => policy.low_threshold_percent = number,
            "age" => policy.min_age = time,
            "every" => policy.interval = time.max(Duration::from_secs(1)),
            other => bail!("{IMAGE_GC_VARIABLE} has no {other:?}"),
        }
    }
    if policy.low_threshold_percent > policy.high_threshold_percent
        || policy.high_threshold_percent > 100
    {
        bail!("{IMAGE_GC_VARIABLE}: low must not be above high, nor high above 100");
    }
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_policy() {
        assert_eq!(parse("").unwrap(), ImageGcPolicy::default());
        assert_eq!(
            parse("high=50,low=0,age=0,every=1s").unwrap(),
            ImageGcPolicy {
                high_threshold_percent: 50,
                low_threshold_percent: 0,
                min_age: Duration::ZERO,
                interval: Duration::from_secs(1),
            }
        );
        assert_eq!(parse("age=3m").unwrap().min_age, Duration::from_secs(180));
        for bad in ["high", "low=90", "high=101", "size=1", "age=soon"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
