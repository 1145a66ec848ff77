//! The calls that speak both ways at once, as the sandbox answers them.

use std::io;

use futures::{Stream, StreamExt, stream};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::server::{Answer, Refusal, SandboxService, bad, refused, streamed};
use crate::Problem;
use crate::streams::{self, Frames, Word, Words};

/// Runs a command in a container.
pub(super) async fn exec<P: SandboxService>(pod: &P, body: Incoming) -> Result<Answer, Refusal> {
    let (query, words) = question(body).await?;
    begin(pod.exec(query, words).await)
}

/// Connects to a container's own streams.
pub(super) async fn attach<P: SandboxService>(pod: &P, body: Incoming) -> Result<Answer, Refusal> {
    let (query, words) = question(body).await?;
    begin(pod.attach(query, words).await)
}

/// Connects to a port.
pub(super) async fn port_forward<P: SandboxService>(
    pod: &P,
    port: &str,
    body: Incoming,
) -> Result<Answer, Refusal> {
    let number = port.parse().ok().filter(|port| *port > 0);
    let number = number.ok_or_else(|| bad(format!("{port:?} is no port")))?;
    let connection = pod.port_forward(number).await.map_err(refused)?;
    Ok(streamed(received(streams::forward(connection, body))))
}

/// The first frame says what is asked.
async fn question<T: DeserializeOwned>(body: Incoming) -> Result<(T, Words), Refusal> {
    let mut words = Words::new(body);
    match words.next().await {
        Ok(Some(Word::Question(json))) => match serde_json::from_slice(&json) {
            Ok(query) => Ok((query, words)),
            Err(error) => Err(bad(error.to_string())),
        },
        Ok(_) => Err(bad("a session begins with a question".to_owned())),
        Err(error) => Err(bad(error.to_string())),
    }
}

fn begin(frames: Result<Frames, Problem>) -> Result<Answer, Refusal> {
    let frames = frames.map_err(refused)?;
    Ok(streamed(frames.map(io::Result::Ok)))
}

fn received<T>(receiver: mpsc::Receiver<T>) -> impl Stream<Item = T> {
    stream::unfold(receiver, |mut receiver| async move {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
}
