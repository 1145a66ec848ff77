//! Fatal errors of the kubelet.

use crate::api_call::ApiCallError;

/// Why the kubelet cannot run.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The API server does not allow the registration.
    #[error(
        "cannot register node {node:?}: not allowed (hint: the agent's certificate must be for system:node:{node} in group system:nodes)"
    )]
    RegistrationForbidden {
        /// The node's name.
        node: String,
        /// The API server's response.
        #[source]
        source: ApiCallError,
    },
    /// The API server rejects the Node object.
    #[error("cannot register node {node:?}: the Node object is not valid")]
    InvalidNode {
        /// The node's name.
        node: String,
        /// The API server's response.
        #[source]
        source: ApiCallError,
    },
}
