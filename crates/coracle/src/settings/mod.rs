//! Settings from the environment (`CORACLE_*`), common to all roles.

pub mod amount;
pub mod image_gc;
pub mod image_limits;
pub mod stream_idle;

use crate::snapshotter;

/// Rejects malformed settings before a job is submitted, instead of failing when a pod or an image needs them.
pub fn check() -> anyhow::Result<()> {
    snapshotter::from_environment()?;
    stream_idle::from_environment()?;
    image_gc::from_environment()?;
    image_limits::from_environment()?;
    Ok(())
}
