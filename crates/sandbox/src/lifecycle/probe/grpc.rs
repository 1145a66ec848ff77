//! gRPC probes: `grpc.health.v1.Health/Check`, whose messages are small enough to encode by hand.

use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, TE, USER_AGENT};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::rt::{Executor, Read, Write};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::GRPCAction;
use pod_protocol::go_duration;
use tokio::time::timeout;

use super::http::error_chain;
use super::target::TargetAddress;
use super::{ProbeResult, ProbedContainer, tls};
use crate::container_runtime::ContainerRuntime;

/// `HealthCheckResponse.ServingStatus`
const SERVING: u64 = 1;
/// gRPC status codes.
const UNKNOWN: u32 = 2;
const UNIMPLEMENTED: u32 = 12;
const UNAVAILABLE: u32 = 14;

/// Calls the health service; succeeds if it responds with SERVING.
pub async fn probe<R: ContainerRuntime>(
    runtime: &R,
    container: &ProbedContainer,
    action: &GRPCAction,
    limit: Duration,
) -> ProbeResult {
    let Ok(port) = u16::try_from(action.port) else {
        return ProbeResult::Unknown(format!("invalid port number: {}", action.port));
    };
    let address = TargetAddress::new(None, container.ip, port);
    let service = action.service.as_deref().unwrap_or_default();
    let tls = action.mode.as_deref() == Some("TLS");
    match timeout(limit, call(runtime, &address, service, tls)).await {
        Ok(result) => result,
        Err(_) => ProbeResult::Failure(format!(
            "timeout: health rpc did not complete within {}",
            go_duration(limit)
        )),
    }
}

async fn call<R: ContainerRuntime>(
    runtime: &R,
    address: &TargetAddress,
    service: &str,
    tls: bool,
) -> ProbeResult {
    let connect_failure = |error: String| {
        ProbeResult::Failure(format!(
            "error: failed to connect service at \"{address}\": {error}"
        ))
    };
    let stream = match address.connect(runtime).await {
        Ok(stream) => stream,
        Err(error) => return connect_failure(error),
    };
    let scheme = if tls { "https" } else { "http" };
    let request = Request::post(format!("{scheme}://{address}/grpc.health.v1.Health/Check"))
        .header(CONTENT_TYPE, "application/grpc")
        .header(TE, "trailers")
        .header(USER_AGENT, "kube-probe/1.37")
        .body(Full::new(Bytes::from(encode_request(service))));
    let request = match request {
        Ok(request) => request,
        Err(error) => return ProbeResult::Unknown(error.to_string()),
    };
    let response = if tls {
        match tls::connect(stream, &address.host, true).await {
            Ok(stream) => send(TokioIo::new(stream), request).await,
            Err(error) => return connect_failure(error),
        }
    } else {
        send(TokioIo::new(stream), request).await
    };
    let result = match response {
        Ok(response) => read_response(response).await,
        Err(error) => Err(GrpcStatus {
            code: UNAVAILABLE,
            message: error,
        }),
    };
    match result {
        Ok(SERVING) => ProbeResult::Success,
        Ok(other) => {
            let name = match other {
                0 => "UNKNOWN".to_owned(),
                2 => "NOT_SERVING".to_owned(),
                3 => "SERVICE_UNKNOWN".to_owned(),
                number => number.to_string(),
            };
            ProbeResult::Failure(format!("service unhealthy (responded with {name:?})"))
        }
        Err(status) if status.code == UNIMPLEMENTED => ProbeResult::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message
        )),
        Err(status) => ProbeResult::Failure(format!(
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
    let (mut sender, connection) = hyper::client::conn::http2::handshake(LocalExecutor, io)
        .await
        .map_err(error_chain)?;
    // Ends when the response is read, because `sender` is dropped by then.
    super::spawn_connection(connection);
    sender.send_request(request).await.map_err(error_chain)
}

/// Spawns on the current thread: a sandbox has one.
#[derive(Clone, Copy)]
struct LocalExecutor;

impl<F: Future + 'static> Executor<F> for LocalExecutor {
    fn execute(&self, future: F) {
        tokio::task::spawn_local(async move {
            future.await;
        });
    }
}

/// The status of a call.
#[derive(Debug)]
struct GrpcStatus {
    code: u32,
    message: String,
}

impl GrpcStatus {
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
        let index = usize::try_from(self.code).unwrap_or(2);
        NAMES.get(index).copied().unwrap_or("Unknown")
    }

    /// Parses trailers, or the headers of a response without a body.
    fn parse(headers: &HeaderMap) -> Option<Self> {
        let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
        let message = headers
            .get("grpc-message")
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            .unwrap_or_default();
        Some(Self { code, message })
    }
}

/// Encodes `HealthCheckRequest { service }` with the length prefix of gRPC.
fn encode_request(service: &str) -> Vec<u8> {
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

/// Reads the status of the service from `HealthCheckResponse { status }`.
async fn read_response(response: Response<Incoming>) -> Result<u64, GrpcStatus> {
    let unknown = |message: String| GrpcStatus {
        code: UNKNOWN,
        message,
    };
    if !response.status().is_success() {
        return Err(GrpcStatus {
            code: if response.status().as_u16() == 404 {
                UNIMPLEMENTED
            } else {
                UNKNOWN
            },
            message: format!(
                "unexpected HTTP status code received from server: {}",
                response.status()
            ),
        });
    }
    let mut status = GrpcStatus::parse(response.headers());
    let mut body = response.into_body();
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| GrpcStatus {
            code: UNAVAILABLE,
            message: error_chain(error),
        })?;
        if let Some(trailers) = frame.trailers_ref() {
            status = GrpcStatus::parse(trailers).or(status);
        } else if let Some(data) = frame.data_ref() {
            if read.len() + data.len() > 4096 {
                return Err(unknown("response too long".to_owned()));
            }
            read.extend_from_slice(data);
        }
    }
    match status {
        Some(status) if status.code == 0 => {}
        Some(status) => return Err(status),
        None => return Err(unknown("no status in the response".to_owned())),
    }
    let message = read.get(5..).filter(|_| read[0] == 0);
    message
        .and_then(first_field)
        .ok_or_else(|| unknown("malformed response".to_owned()))
}

/// The varint in field 1 of a message; 0 if it is missing.
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
    fn messages_are_encoded_and_decoded() {
        assert_eq!(encode_request(""), [0, 0, 0, 0, 0]);
        assert_eq!(encode_request("ab"), [0, 0, 0, 0, 4, 0x0a, 2, b'a', b'b']);
        assert_eq!(encode_request(&"x".repeat(200))[5..8], [0x0a, 0xc8, 0x01]);
        assert_eq!(first_field(&[]), Some(0));
        assert_eq!(first_field(&[8, 1]), Some(1));
        assert_eq!(first_field(&[0x12, 1, 9, 8, 2]), Some(2));
        assert_eq!(first_field(&[0x12, 9, 9]), None);
        assert_eq!(first_field(&[8, 0xff]), None);
    }
}
