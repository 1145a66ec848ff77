//! Images in files: what `docker save` writes, in its old and its new form, and OCI image layouts.

mod load;
mod save;

pub use load::{LoadError, Loaded, load, load_directory};
pub use save::{Format, SaveError, save};
