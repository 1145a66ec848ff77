//! Image archives: `docker save` archives in the old and the new format, and OCI image layouts.

mod load;
mod save;

pub use load::{LoadError, LoadedImage, load, load_directory};
pub use save::{ArchiveFormat, SaveError, save};
