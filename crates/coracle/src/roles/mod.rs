//! The roles that Coracle starts itself: `coracle internal NAME` is module `NAME` here. Their input comes through pipes.

pub mod control_plane;
pub mod hub;
pub mod janitor;
pub mod node;
pub mod pull;
pub mod receive;
pub mod sandbox;
