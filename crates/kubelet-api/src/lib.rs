//! The kubelet's HTTPS API: what the API server asks of a node (logs, exec, attach, port-forward, stats).
//!
//! Responsible for: the listening socket, mutual TLS, who may call, and the HTTP side of every endpoint. Today that is
//! `/healthz`, `/pods`, `/runningpods/` and `/containerLogs`; the interactive endpoints are not there yet.
//!
//! Deliberately does not know: how a container runs, nor how the node learns of its pods. It asks a [`PodSource`].
//!
//! Start reading at [`serve`] (`server.rs`: the accept loop), then `routes.rs` (the endpoints). `tls.rs` holds who is
//! let in, `peer.rs` how a caller is named, `seam.rs` what is asked of the kubelet.
//!
//! Invariant: a handler runs only for a peer whose certificate the cluster's CA signed *and* whose common name is on
//! the allow-list. There is no unauthenticated endpoint, `/healthz` included.

mod error;
mod logs;
mod peer;
mod routes;
mod seam;
mod server;
mod tls;

pub use error::ApiError;
pub use peer::{Peer, peer_of};
pub use seam::{
    AttachOptions, ByteReader, ByteWriter, Connection, Duplex, ExecOptions, Exit, LogBytes,
    LogOptions, LogStream, NoLogs, NoSession, NoSessionClass, PodSource, Session, Streams,
    TerminalSize,
};
pub use server::serve;
pub use tls::ServerIdentity;

/// The common name of the certificate with which the API server calls kubelets.
pub const API_SERVER_CLIENT: &str = "kube-apiserver-kubelet-client";
