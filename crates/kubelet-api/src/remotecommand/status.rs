//! The exit status of a command, for the client's error stream.

use bytes::Bytes;
use serde_json::{Value, json};

use super::RemoteCommandKind;
use crate::pod_source::{SessionError, SessionErrorKind, SessionExit};

/// The format of the error stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorFormat {
    /// Since protocol version 4: a `metav1.Status` as JSON.
    Json,
    /// Before version 4: the message of a failure, or nothing on success.
    Text,
}

/// A `metav1.Status` with upstream's messages.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RemoteCommandStatus(Value);

impl RemoteCommandStatus {
    pub(super) fn from_exit(kind: RemoteCommandKind, exit: &SessionExit) -> Self {
        match exit {
            SessionExit::Code(0) => Self(json!({ "metadata": {}, "status": "Success" })),
            // Attach succeeded, whatever the exit code of the container.
            SessionExit::Code(_) if kind == RemoteCommandKind::Attach => {
                Self(json!({ "metadata": {}, "status": "Success" }))
            }
            SessionExit::Code(code) => {
                // kubectl expects one byte.
                let code = code & 0xff;
                let message = format!(
                    "command terminated with non-zero exit code: command terminated with exit code {code}"
                );
                Self(json!({
                    "metadata": {},
                    "status": "Failure",
                    "message": message,
                    "reason": "NonZeroExitCode",
                    "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
                }))
            }
            SessionExit::Failed(message) => {
                Self::failure(kind, SessionErrorKind::Internal, message)
            }
        }
    }

    pub(super) fn from_error(kind: RemoteCommandKind, error: &SessionError) -> Self {
        Self::failure(kind, error.kind, &error.message)
    }

    fn failure(kind: RemoteCommandKind, class: SessionErrorKind, message: &str) -> Self {
        let operation = match kind {
            RemoteCommandKind::Exec => "error executing command in container",
            RemoteCommandKind::Attach => "error attaching to container",
        };
        let (reason, code, prefix) = match class {
            SessionErrorKind::NotFound => ("NotFound", 404, ""),
            SessionErrorKind::Internal => ("InternalError", 500, "Internal error occurred: "),
        };
        Self(json!({
            "metadata": {},
            "status": "Failure",
            "message": format!("{prefix}{operation}: {message}"),
            "reason": reason,
            "code": code,
        }))
    }

    pub(super) fn text(&self, format: ErrorFormat) -> Bytes {
        match format {
            ErrorFormat::Json => self.0.to_string().into(),
            ErrorFormat::Text => match &self.0["message"] {
                Value::String(message) => message.clone().into(),
                _ => Bytes::new(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_is_in_the_causes() {
        let status =
            RemoteCommandStatus::from_exit(RemoteCommandKind::Exec, &SessionExit::Code(42)).0;
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(status["details"]["causes"][0]["reason"], "ExitCode");
        assert_eq!(status["details"]["causes"][0]["message"], "42");
    }

    #[test]
    fn success_is_empty_in_text_format() {
        let status = RemoteCommandStatus::from_exit(RemoteCommandKind::Exec, &SessionExit::Code(0));
        let json: Value = serde_json::from_slice(&status.text(ErrorFormat::Json)).unwrap();
        assert_eq!(json["status"], "Success");
        assert_eq!(status.text(ErrorFormat::Text), "");
        let attached =
            RemoteCommandStatus::from_exit(RemoteCommandKind::Attach, &SessionExit::Code(137));
        assert_eq!(attached, status);
    }

    #[test]
    fn failures_have_upstreams_messages() {
        let status = RemoteCommandStatus::from_exit(
            RemoteCommandKind::Exec,
            &SessionExit::Failed("it broke".to_owned()),
        );
        assert_eq!(
            status.text(ErrorFormat::Text),
            "Internal error occurred: error executing command in container: it broke"
        );
        let error = SessionError::not_found("no container c");
        let status = RemoteCommandStatus::from_error(RemoteCommandKind::Attach, &error);
        assert_eq!(status.0["code"], 404);
        assert_eq!(
            status.text(ErrorFormat::Text),
            "error attaching to container: no container c"
        );
    }
}
