//! Bidirectional requests, from the sandbox's end.

use std::io;

use futures::{Stream, StreamExt, stream};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::server::{SandboxService, ServiceResponse, streaming};
use crate::RequestError;
use crate::streams::{self, FrameReader, FrameStream, StreamFrame};

/// Runs a command in a container.
pub(super) async fn exec<S: SandboxService>(
    service: &S,
    body: Incoming,
) -> Result<ServiceResponse, RequestError> {
    let (query, client) = read_query(body).await?;
    respond(service.exec(query, client).await)
}

/// Attaches to the streams of a running container.
pub(super) async fn attach<S: SandboxService>(
    service: &S,
    body: Incoming,
) -> Result<ServiceResponse, RequestError> {
    let (query, client) = read_query(body).await?;
    respond(service.attach(query, client).await)
}

/// Connects to a port.
pub(super) async fn port_forward<S: SandboxService>(
    service: &S,
    port: &str,
    body: Incoming,
) -> Result<ServiceResponse, RequestError> {
    let number = port.parse().ok().filter(|port| *port > 0);
    let number =
        number.ok_or_else(|| RequestError::bad_request(format!("invalid port {port:?}")))?;
    let connection = service.port_forward(number).await?;
    Ok(streaming(receiver_stream(streams::forward(
        connection, body,
    ))))
}

/// Reads the first frame, which holds the query.
async fn read_query<T: DeserializeOwned>(body: Incoming) -> Result<(T, FrameReader), RequestError> {
    let mut client = FrameReader::new(body);
    match client.next().await {
        Ok(Some(StreamFrame::Query(json))) => match serde_json::from_slice(&json) {
            Ok(query) => Ok((query, client)),
            Err(error) => Err(RequestError::bad_request(error.to_string())),
        },
        Ok(_) => Err(RequestError::bad_request(
            "expected a query as the first frame".to_owned(),
        )),
        Err(error) => Err(RequestError::bad_request(error.to_string())),
    }
}

fn respond(frames: Result<FrameStream, RequestError>) -> Result<ServiceResponse, RequestError> {
    Ok(streaming(frames?.map(io::Result::Ok)))
}

fn receiver_stream<T>(receiver: mpsc::Receiver<T>) -> impl Stream<Item = T> {
    stream::unfold(receiver, |mut receiver| async move {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
}
