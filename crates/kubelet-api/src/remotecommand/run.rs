//! `POST /run/NAMESPACE/POD[/UID]/CONTAINER?cmd=COMMAND`: runs a command and responds with its output.
//!
//! Kubernetes itself does not use it any more, but upstream's kubelet still has it, and so some tools rely on it.

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::session::next_output;
use super::{ContainerPath, RemoteCommandError, RemoteCommandKind, find_running};
use crate::pod_source::{ExecOptions, RequestedStreams, SessionExit, SessionOutput};
use crate::routes::ApiState;

/// Limit for each output stream. The rest is discarded, as container runtimes do for upstream's kubelet.
const MAX_RUN_OUTPUT: usize = 16 * 1024 * 1024;

/// The endpoint.
pub(crate) async fn run(
    State(api): State<ApiState>,
    Path(target): Path<ContainerPath>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = query.unwrap_or_default();
    let mut values = form_urlencoded::parse(query.as_bytes());
    let command = values.find(|(name, _)| name == "cmd");
    let command = command.map(|(_, value)| value).unwrap_or_default();
    if command.is_empty() {
        return RemoteCommandError::NoCommand.into_response();
    }
    // Like upstream: split at spaces, without quoting.
    let command = command.split(' ').map(str::to_owned).collect();
    match find_running(RemoteCommandKind::Exec, &api, &target) {
        Ok((_, uid)) => run_command(&api, &uid, target.container, command).await,
        Err(error) => error.into_response(),
    }
}

async fn run_command(
    api: &ApiState,
    uid: &str,
    container: String,
    command: Vec<String>,
) -> Response {
    let failed = |message: String| (StatusCode::INTERNAL_SERVER_ERROR, message).into_response();
    let name = command.join(" ");
    let options = ExecOptions {
        container,
        command,
        streams: RequestedStreams {
            stdout: true,
            stderr: true,
            ..RequestedStreams::default()
        },
    };
    let mut session = match api.pods.exec(uid, options).await {
        Ok(session) => session,
        Err(error) => return failed(error.message),
    };
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let exit = loop {
        match next_output(&mut session.output).await {
            SessionOutput::Stdout(bytes) => append(&mut output, &bytes),
            SessionOutput::Stderr(bytes) => append(&mut errors, &bytes),
            SessionOutput::Exit(exit) => break exit,
        }
    };
    match exit {
        SessionExit::Code(0) => {
            output.extend(errors);
            // Upstream's content type, whatever the command wrote.
            ([(header::CONTENT_TYPE, "application/json")], output).into_response()
        }
        SessionExit::Code(code) => {
            let errors = String::from_utf8_lossy(&errors);
            failed(format!("command '{name}' exited with {code}: {errors}"))
        }
        SessionExit::Failed(message) => failed(message),
    }
}

fn append(output: &mut Vec<u8>, bytes: &[u8]) {
    let room = MAX_RUN_OUTPUT - output.len();
    output.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::to_bytes;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::streams::StreamTimeouts;
    use crate::testing::TestPods;
    use crate::upgrade::UpgradedConnections;

    async fn post_run(container: &str, query: &str) -> (u16, Vec<u8>) {
        let api = ApiState {
            pods: Arc::new(TestPods::default()),
            timeouts: StreamTimeouts::default(),
            upgrades: UpgradedConnections::new(CancellationToken::new()),
        };
        let target = ContainerPath {
            namespace: "default".to_owned(),
            pod: "p".to_owned(),
            uid: None,
            container: container.to_owned(),
        };
        let response = run(State(api), Path(target), RawQuery(Some(query.to_owned()))).await;
        let code = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (code, body.to_vec())
    }

    async fn post_run_text(container: &str, query: &str) -> (u16, String) {
        let (code, body) = post_run(container, query).await;
        (code, String::from_utf8(body).unwrap())
    }

    #[tokio::test]
    async fn responds_with_output_or_failure() {
        assert_eq!(post_run("c", "cmd=zeros+5").await, (200, vec![0; 5]));
        let (code, body) = post_run("c", "cmd=zeros+20000000").await;
        assert_eq!((code, body.len()), (200, MAX_RUN_OUTPUT));
        assert_eq!(
            post_run_text("c", "cmd=both").await,
            (500, "command 'both' exited with 3: err".to_owned())
        );
        assert_eq!(
            post_run_text("c", "cmd=nonsense").await,
            (500, "nonsense: not found".to_owned())
        );
        assert_eq!(
            post_run_text("c", "cmd=broken").await,
            (500, "the sandbox has exited".to_owned())
        );
    }

    #[tokio::test]
    async fn missing_command_or_container_is_rejected() {
        let none = "you must specify at least one command for the container";
        assert_eq!(
            post_run_text("c", "command=true").await,
            (400, none.to_owned())
        );
        assert_eq!(
            post_run_text("ended", "cmd=true").await,
            (500, "container not found (\"ended\")".to_owned())
        );
    }
}
