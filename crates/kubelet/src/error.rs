//! What can end the kubelet for good.

use crate::api::CallError;

/// Why this machine can't be a node of the cluster.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The API server answers, and its answer is no.
    #[error(
        "the API server refuses to register node {node:?}; check that the agent's certificate is for system:node:{node} in group system:nodes"
    )]
    Refused {
        /// The node's name.
        node: String,
        /// The API server's words.
        #[source]
        source: CallError,
    },
    /// The API server finds the Node object itself wrong.
    #[error("the API server finds the Node object of {node:?} invalid")]
    Invalid {
        /// The node's name.
        node: String,
        /// The API server's words.
        #[source]
        source: CallError,
    },
    /// The socket of the node's sandboxes can't be opened.
    #[error("cannot open the socket at {path:?}, where pods report")]
    Socket {
        /// The socket.
        path: std::path::PathBuf,
        /// The system's words.
        #[source]
        source: std::io::Error,
    },
}
