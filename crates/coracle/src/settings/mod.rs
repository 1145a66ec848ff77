//! Settings from the environment (`CORACLE_*`), common to all roles.

pub mod amount;
pub mod image_gc;
pub mod image_limits;
pub mod stream_idle;

use crate::snapshotter;

/// Splits a setting such as `high=85,low=80` into tuples of the whole pair, its name and its value.
fn pairs(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    let parts = text.split(',').filter(|part| !part.is_empty());
    parts.map(|part| {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        (part, name, value)
    })
}

/// Rejects malformed settings before a job is submitted, instead of failing when a pod or an image needs them.
pub fn check() -> anyhow::Result<()> {
    snapshotter::from_environment()?;
    stream_idle::from_environment()?;
    image_gc::from_environment()?;
    image_limits::from_environment()?;
    Ok(())
}
