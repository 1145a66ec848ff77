//! Requests to the API server, with a time-out and a short error.

use std::time::Duration;

/// Time-out of one request. The API server answers in milliseconds or not at all.
const API_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Delays in milliseconds between attempts that fail with 403: the Node authorizer learns of a newly bound pod a moment later.
const FORBIDDEN_RETRY_DELAYS: [u64; 4] = [50, 100, 200, 400];

/// Why a request to the API server failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiCallError {
    /// The API server did not answer in time.
    #[error("the API server did not answer within {} s", API_REQUEST_TIMEOUT.as_secs())]
    Timeout,
    /// The API server answered with an error.
    #[error("{message} ({code})")]
    Status {
        /// The HTTP status code.
        code: u16,
        /// The API server's message.
        message: String,
    },
    /// The API server was not reached, or its response was not valid.
    #[error("cannot reach the API server")]
    Transport(#[source] Box<kube::Error>),
}

impl ApiCallError {
    /// The HTTP status code, if the API server answered.
    pub(crate) fn code(&self) -> Option<u16> {
        match self {
            Self::Status { code, .. } => Some(*code),
            Self::Timeout | Self::Transport(_) => None,
        }
    }
}

impl From<kube::Error> for ApiCallError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Status {
                code: status.code,
                message: status.message,
            },
            other => Self::Transport(Box::new(other)),
        }
    }
}

/// Sends a request with a time-out.
pub(crate) async fn call<T>(
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiCallError> {
    match tokio::time::timeout(API_REQUEST_TIMEOUT, request).await {
        Ok(response) => response.map_err(ApiCallError::from),
        Err(_) => Err(ApiCallError::Timeout),
    }
}

/// Sends a request that the Node authorizer allows only because a pod is bound to this node, and retries it if it is forbidden.
pub(crate) async fn call_for_bound_pod<T, F: Future<Output = kube::Result<T>>>(
    request: impl Fn() -> F,
) -> Result<T, ApiCallError> {
    let mut delays = FORBIDDEN_RETRY_DELAYS.into_iter();
    loop {
        match (call(request()).await, delays.next()) {
            (Err(ApiCallError::Status { code: 403, .. }), Some(delay)) => {
                tokio::time::sleep(Duration::from_millis(delay)).await;
            }
            (response, _) => return response,
        }
    }
}
