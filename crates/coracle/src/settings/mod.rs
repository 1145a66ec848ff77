//! Settings from the environment (`CORACLE_*`), common to all roles.

pub mod amount;
pub mod image_limits;
pub mod stream_idle;

use crate::roles::node::image_gc;
use crate::rootfs;

/// Rejects malformed settings before a job is submitted, rather than when a pod or an image needs them.
pub fn check() -> anyhow::Result<()> {
    rootfs::choice()?;
    stream_idle::timeout()?;
    image_gc::settings()?;
    image_limits::from_environment()?;
    Ok(())
}
