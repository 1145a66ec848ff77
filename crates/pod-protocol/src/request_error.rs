//! Why a sandbox does not serve a request.

use serde::{Deserialize, Serialize};

/// An error of a request for logs, exec, attach or port-forward, or of any other call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestError {
    /// The class of the error, from which a status code of the kubelet's API follows.
    pub kind: RequestErrorKind,
    /// For people.
    pub message: String,
}

/// The class of a [`RequestError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestErrorKind {
    /// The request is invalid.
    BadRequest,
    /// The pod, container or log does not exist.
    NotFound,
    /// The sandbox could not do it.
    Failed,
}

impl RequestError {
    /// The request is invalid.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(RequestErrorKind::BadRequest, message)
    }

    /// The pod, container or log does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(RequestErrorKind::NotFound, message)
    }

    /// The sandbox could not do it.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(RequestErrorKind::Failed, message)
    }

    fn new(kind: RequestErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }
}
