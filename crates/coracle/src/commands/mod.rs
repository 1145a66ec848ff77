//! The user's commands: `coracle NAME` is module `NAME`. No command uses another's module.

pub mod doctor;
pub mod image;
pub mod kubernetes;
pub mod logs;
pub mod run;
