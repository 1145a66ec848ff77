//! How a command ended, as clients hear it on their error stream.

use bytes::Bytes;
use serde_json::{Value, json};

use super::Kind;
use crate::seam::{Exit, NoSession, NoSessionClass};

/// How the error stream is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// From version 4 on: a metav1.Status.
    Json,
    /// Before: the words of a failure, and nothing for success.
    Words,
}

/// An end, in the words that upstream has for it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Status(Value);

impl Status {
    pub(super) fn of_exit(kind: Kind, exit: &Exit) -> Self {
        match exit {
            Exit::Code(0) => Self(json!({ "metadata": {}, "status": "Success" })),
            // However a container ends, it was attached to.
            Exit::Code(_) if kind == Kind::Attach => {
                Self(json!({ "metadata": {}, "status": "Success" }))
            }
            Exit::Code(code) => {
                // kubectl reads one byte.
                let code = code & 0xff;
                let words = format!(
                    "command terminated with non-zero exit code: command terminated with exit code {code}"
                );
                Self(json!({
                    "metadata": {},
                    "status": "Failure",
                    "message": words,
                    "reason": "NonZeroExitCode",
                    "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
                }))
            }
            Exit::Failed(words) => Self::failure(kind, NoSessionClass::Internal, words),
        }
    }

    pub(super) fn of_refusal(kind: Kind, refusal: &NoSession) -> Self {
        Self::failure(kind, refusal.class, &refusal.words)
    }

    fn failure(kind: Kind, class: NoSessionClass, words: &str) -> Self {
        let doing = match kind {
            Kind::Exec => "error executing command in container",
            Kind::Attach => "error attaching to container",
        };
        let (reason, code, prefix) = match class {
            NoSessionClass::NotFound => ("NotFound", 404, ""),
            NoSessionClass::BadRequest => ("BadRequest", 400, ""),
            NoSessionClass::Internal => ("InternalError", 500, "Internal error occurred: "),
        };
        Self(json!({
            "metadata": {},
            "status": "Failure",
            "message": format!("{prefix}{doing}: {words}"),
            "reason": reason,
            "code": code,
        }))
    }

    pub(super) fn text(&self, format: Format) -> Bytes {
        match format {
            Format::Json => self.0.to_string().into(),
            Format::Words => match &self.0["message"] {
                Value::String(words) => words.clone().into(),
                _ => Bytes::new(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_causes() {
        let status = Status::of_exit(Kind::Exec, &Exit::Code(42)).0;
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(status["details"]["causes"][0]["reason"], "ExitCode");
        assert_eq!(status["details"]["causes"][0]["message"], "42");
    }

    #[test]
    fn success_is_said_only_in_json() {
        let status = Status::of_exit(Kind::Exec, &Exit::Code(0));
        let json: Value = serde_json::from_slice(&status.text(Format::Json)).unwrap();
        assert_eq!(json["status"], "Success");
        assert_eq!(status.text(Format::Words), "");
        let attached = Status::of_exit(Kind::Attach, &Exit::Code(137));
        assert_eq!(attached, status);
    }

    #[test]
    fn failures_have_upstreams_words() {
        let status = Status::of_exit(Kind::Exec, &Exit::Failed("it broke".to_owned()));
        assert_eq!(
            status.text(Format::Words),
            "Internal error occurred: error executing command in container: it broke"
        );
        let refusal = NoSession::not_found("no container c");
        let status = Status::of_refusal(Kind::Attach, &refusal);
        assert_eq!(status.0["code"], 404);
        assert_eq!(
            status.text(Format::Words),
            "error attaching to container: no container c"
        );
    }
}
