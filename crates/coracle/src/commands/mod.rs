//! The commands that users call: `coracle NAME` is module `NAME` here. No command uses another's module.

pub mod doctor;
pub mod image;
pub mod kubernetes;
pub mod logs;
pub mod run;
