//! The roles that Coracle starts itself: `coracle internal NAME` runs module `NAME`. Each role reads its input from a pipe or socket.

pub mod control_plane;
pub mod hub;
pub mod janitor;
pub mod node;
pub mod pull;
pub mod receive;
pub mod sandbox;
