//! One request to the API server: bounded in time, with an error that says only what matters.

use std::time::Duration;

/// How long any one request may take; the API server answers in milliseconds or not at all.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// A refusal right after a pod was bound often only means that the authorizer has not heard of it yet: milliseconds.
const REFUSED_WAITS: [u64; 4] = [50, 100, 200, 400];

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

/// The same for what a node may ask only because a pod was bound to it, maybe just now.
pub(crate) async fn call_for_pod<T, F: Future<Output = kube::Result<T>>>(
    ask: impl Fn() -> F,
) -> Result<T, CallError> {
    let mut waits = REFUSED_WAITS.into_iter();
    loop {
        match (call(ask()).await, waits.next()) {
            (Err(CallError::Answer { code: 403, .. }), Some(wait)) => {
                tokio::time::sleep(Duration::from_millis(wait)).await;
            }
            (answer, _) => return answer,
        }
    }
}
