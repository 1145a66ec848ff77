//! Parts of client authentication that all listeners share.
//!
//! Responsible for: limiting the connections whose client has not authenticated yet ([`UnauthenticatedConnections`]), and reading the
//! name of a client from its certificate ([`certificate_common_name`]).
//!
//! Deliberately does not know: sockets, TLS handshakes, and which clients a listener admits.
//!
//! Start reading at [`UnauthenticatedConnections`].

#![warn(unused_crate_dependencies)]

mod certificate_name;
mod unauthenticated;

pub use certificate_name::certificate_common_name;
pub use unauthenticated::{UnauthenticatedConnections, UnauthenticatedSlot};
