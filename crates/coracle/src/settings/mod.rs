//! Settings that come from the environment (`CORACLE_*`), for every role alike.

pub mod amount;
pub mod image_limits;
pub mod stream_idle;

use crate::roles::node::image_gc;
use crate::rootfs;

/// Rejects malformed settings before a job is asked for, rather than when pods or images suffer from them.
pub fn check() -> anyhow::Result<()> {
    rootfs::choice()?;
    stream_idle::timeout()?;
    image_gc::settings()?;
    image_limits::from_environment()?;
    Ok(())
}
