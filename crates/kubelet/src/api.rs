//! One request to the API server: bounded in time, with an error that says only what matters.

use std::time::Duration;

/// How long any one request may take; the API server answers in milliseconds or not at all.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request to the API server did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No answer came in time.
    #[error("no answer from the API server within {} s", CALL_TIMEOUT.as_secs())]
    Timeout,
    /// The API server answered with an error.
    #[error("{message} ({code})")]
    Answer {
        /// The HTTP status code.
        code: u16,
        /// The API server's words.
        message: String,
    },
    /// The API server could not be reached, or its answer could not be understood.
    #[error("can't talk to the API server")]
    Transport(#[source] Box<kube::Error>),
}

impl CallError {
    /// The HTTP status code, if there was an answer.
    pub(crate) fn code(&self) -> Option<u16> {
        match self {
            Self::Answer { code, .. } => Some(*code),
            Self::Timeout | Self::Transport(_) => None,
        }
    }
}

impl From<kube::Error> for CallError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Answer {
                code: status.code,
                message: status.message,
            },
            other => Self::Transport(Box::new(other)),
        }
    }
}

/// Waits for a request to the API server, but not for ever.
pub(crate) async fn call<T>(
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(CALL_TIMEOUT, request).await {
        Ok(answer) => answer.map_err(CallError::from),
        Err(_) => Err(CallError::Timeout),
    }
}
