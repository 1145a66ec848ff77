//! The gRPC health protocol, `grpc.health.v1.Health/Check`, whose messages are small enough to write by hand.

use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, TE, USER_AGENT};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::rt::{Executor, Read, Write};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::GRPCAction;
use tokio::time::timeout;

use super::http::chain;
use super::target::Address;
use super::{Outcome, Subject, tls};
use crate::life::go_duration;
use crate::seams::Runtime;

const SERVING: u64 = 1;

/// Asks once.
pub async fn check<R: Runtime>(
    runtime: &R,
    subject: &Subject,
    action: &GRPCAction,
    limit: Duration,
) -> Outcome {
    let Ok(port) = u16::try_from(action.port) else {
        return Outcome::Error(format!("invalid port number: {}", action.port));
    };
    let address = Address::new(None, subject.ip, port);
    let service = action.service.as_deref().unwrap_or_default();
    let tls = action.mode.as_deref() == Some("TLS");
    match timeout(limit, ask(runtime, &address, service, tls)).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Failure(format!(
            "timeout: health rpc did not complete within {}",
            go_duration(limit)
        )),
    }
}

async fn ask<R: Runtime>(runtime: &R, address: &Address, service: &str, tls: bool) -> Outcome {
    let no_connection = |error: String| {
        Outcome::Failure(format!(
            "error: failed to connect service at \"{address}\": {error}"
        ))
    };
    let stream = match address.connect(runtime).await {
        Ok(stream) => stream,
        Err(error) => return no_connection(error),
    };
    let scheme = if tls { "https" } else { "http" };
    let request = Request::post(format!("{scheme}://{address}/grpc.health.v1.Health/Check"))
        .header(CONTENT_TYPE, "application/grpc")
        .header(TE, "trailers")
        .header(USER_AGENT, "kube-probe/1.37")
        .body(Full::new(Bytes::from(question(service))));
    let request = match request {
        Ok(request) => request,
        Err(error) => return Outcome::Error(error.to_string()),
    };
    let response = if tls {
        match tls::connect(stream, &address.host, true).await {
            Ok(stream) => send(TokioIo::new(stream), request).await,
            Err(error) => return no_connection(error),
        }
    } else {
        send(TokioIo::new(stream), request).await
    };
    let result = match response {
        Ok(response) => answer(response).await,
        Err(error) => Err(Status {
            code: 14,
            message: error,
        }),
    };
    match result {
        Ok(SERVING) => Outcome::Success,
        Ok(other) => {
            let word = match other {
                0 => "UNKNOWN".to_owned(),
                2 => "NOT_SERVING".to_owned(),
                3 => "SERVICE_UNKNOWN".to_owned(),
                number => number.to_string(),
            };
            Outcome::Failure(format!("service unhealthy (responded with {word:?})"))
        }
        Err(status) if status.code == 12 => Outcome::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message
        )),
        Err(status) => Outcome::Failure(format!(
            "error: health rpc probe failed: rpc error: code = {} desc = {}",
            status.name(),
            status.message
        )),
    }
}

/// Sends a request over HTTP/2.
pub(super) async fn send<T, B>(io: T, request: Request<B>) -> Result<Response<Incoming>, String>
where
    T: Read + Write + Unpin + 'static,
    B: Body + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (mut sender, connection) = hyper::client::conn::http2::handshake(Local, io)
        .await
        .map_err(chain)?;
    // Ends when the answer has been read, since nothing more can be sent then.
    tokio::task::spawn_local(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a probe's connection broke");
        }
    });
    sender.send_request(request).await.map_err(chain)
}

/// Everything of a sandbox is on one thread.
#[derive(Clone, Copy)]
struct Local;

impl<F: Future + 'static> Executor<F> for Local {
    fn execute(&self, future: F) {
        tokio::task::spawn_local(async move {
            future.await;
        });
    }
}

/// The status of a call that went wrong.
#[derive(Debug)]
struct Status {
    code: u32,
    message: String,
}

impl Status {
    fn name(&self) -> &'static str {
        const NAMES: [&str; 17] = [
            "OK",
            "Canceled",
            "Unknown",
            "InvalidArgument",
            "DeadlineExceeded",
            "NotFound",
            "AlreadyExists",
            "PermissionDenied",
            "ResourceExhausted",
            "FailedPrecondition",
            "Aborted",
            "OutOfRange",
            "Unimplemented",
            "Internal",
            "Unavailable",
            "DataLoss",
            "Unauthenticated",
        ];
        let place = usize::try_from(self.code).unwrap_or(2);
        NAMES.get(place).copied().unwrap_or("Unknown")
    }

    /// From trailers, or the headers of an answer that has nothing else.
    fn read(headers: &HeaderMap) -> Option<Self> {
        let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
        let message = headers
            .get("grpc-message")
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .unwrap_or_default();
        Some(Self { code, message })
    }
}

/// `HealthCheckRequest { service }`, in the frame of a message.
fn question(service: &str) -> Vec<u8> {
    let mut message = Vec::new();
    if !service.is_empty() {
        message.push(0x0a);
        varint(service.len(), &mut message);
        message.extend_from_slice(service.as_bytes());
    }
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut framed = vec![0];
    framed.extend_from_slice(&length.to_be_bytes());
    framed.append(&mut message);
    framed
}

fn varint(mut value: usize, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

/// The status of the service in `HealthCheckResponse { status }`.
async fn answer(response: Response<Incoming>) -> Result<u64, Status> {
    let unknown = |message: String| Status { code: 2, message };
    if !response.status().is_success() {
        return Err(Status {
            code: if response.status().as_u16() == 404 {
                12
            } else {
                2
            },
            message: format!(
                "unexpected HTTP status code received from server: {}",
                response.status()
            ),
        });
    }
    let mut status = Status::read(response.headers());
    let mut body = response.into_body();
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Status {
            code: 14,
            message: chain(error),
        })?;
        if let Some(trailers) = frame.trailers_ref() {
            status = Status::read(trailers).or(status);
        } else if let Some(data) = frame.data_ref() {
            if read.len() + data.len() > 4096 {
                return Err(unknown("answer too long".to_owned()));
            }
            read.extend_from_slice(data);
        }
    }
    match status {
        Some(status) if status.code == 0 => {}
        Some(status) => return Err(status),
        None => return Err(unknown("no status in the answer".to_owned())),
    }
    let message = read.get(5..).filter(|_| read[0] == 0);
    message
        .and_then(first_field)
        .ok_or_else(|| unknown("an answer that can't be read".to_owned()))
}

/// Field 1 of a message, a number; 0 if it isn't there.
fn first_field(mut message: &[u8]) -> Option<u64> {
    let mut value = 0;
    while !message.is_empty() {
        let key = take_varint(&mut message)?;
        match key & 7 {
            0 => {
                let number = take_varint(&mut message)?;
                if key >> 3 == 1 {
                    value = number;
                }
            }
            1 => message = message.get(8..)?,
            2 => {
                let length = usize::try_from(take_varint(&mut message)?).ok()?;
                message = message.get(length..)?;
            }
            5 => message = message.get(4..)?,
            _ => return None,
        }
    }
    Some(value)
}

fn take_varint(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages() {
        assert_eq!(question(""), [0, 0, 0, 0, 0]);
        assert_eq!(question("ab"), [0, 0, 0, 0, 4, 0x0a, 2, b'a', b'b']);
        assert_eq!(question(&"x".repeat(200))[5..8], [0x0a, 0xc8, 0x01]);
        assert_eq!(first_field(&[]), Some(0));
        assert_eq!(first_field(&[8, 1]), Some(1));
        assert_eq!(first_field(&[0x12, 1, 9, 8, 2]), Some(2));
        assert_eq!(first_field(&[0x12, 9, 9]), None);
        assert_eq!(first_field(&[8, 0xff]), None);
    }
}
