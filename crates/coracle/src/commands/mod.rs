//! The user's commands: `coracle COMMAND` calls `main` in module `COMMAND`. Commands use nothing of each other; shared parts are beside
//! this module.

pub mod completion;
pub mod doctor;
pub mod image;
pub mod kubeconfig;
pub mod kubectl;
pub mod kubernetes;
pub mod logs;
pub mod man;
pub mod run;
pub mod shell;
