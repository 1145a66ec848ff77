//! HTTP probes, and HTTP lifecycle hooks.

use std::net::IpAddr;
use std::time::Duration;

use http::header::{
    ACCEPT, CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION, USER_AGENT,
};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction};
use tokio::time::timeout;

use super::target::{self, TargetAddress};
use super::{ProbeResult, ProbedContainer, grpc, tls};
use crate::container_runtime::ContainerRuntime;

/// How much of a response's body is read.
const MAX_BODY: usize = 10 * 1024;
const MAX_REDIRECTS: usize = 10;

/// Fetches the URL; succeeds if the status is 2xx.
pub async fn probe<R: ContainerRuntime>(
    runtime: &R,
    container: &ProbedContainer,
    action: &HTTPGetAction,
    limit: Duration,
) -> ProbeResult {
    let get = match HttpGet::new(action, &container.spec, container.ip, "probe") {
        Ok(get) => get,
        Err(error) => return ProbeResult::Unknown(error),
    };
    let url = get.url.to_string();
    match timeout(limit, get.follow(runtime)).await {
        Ok(Ok(response)) => response.into_result(),
        Ok(Err(error)) => ProbeResult::Failure(format!("Get {url:?}: {error}")),
        Err(_) => ProbeResult::Failure(format!(
            "Get {url:?}: context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        )),
    }
}

/// Fetches the URL of a lifecycle hook; succeeds with any response.
pub async fn hook<R: ContainerRuntime>(
    runtime: &R,
    ip: Option<IpAddr>,
    container: &Container,
    action: &HTTPGetAction,
) -> Result<(), String> {
    let get = HttpGet::new(action, container, ip, "lifecycle")?;
    let url = get.url.to_string();
    match get.clone().follow(runtime).await {
        Ok(_) => Ok(()),
        Err(error) if get.url.https => {
            // As upstream, retry a server without TLS over plain HTTP, without credentials.
            let mut plain = get;
            plain.url.https = false;
            plain.headers.remove(http::header::AUTHORIZATION);
            plain
                .follow(runtime)
                .await
                .map(drop)
                .map_err(|_| format!("Get {url:?}: {error}"))
        }
        Err(error) => Err(format!("Get {url:?}: {error}")),
    }
}

/// Status and the start of the body of a response.
struct HttpResponse {
    status: StatusCode,
    body: String,
}

impl HttpResponse {
    fn into_result(self) -> ProbeResult {
        match self.status.as_u16() {
            200..=299 => ProbeResult::Success,
            300..=399 => ProbeResult::Warning(format!(
                "Probe terminated redirects, Response body: {}",
                self.body
            )),
            // Without the body: it may have content that users with access to Events must not see.
            code => ProbeResult::Failure(format!("HTTP probe failed with statuscode: {code}")),
        }
    }
}

#[derive(Clone, Debug)]
struct HttpGet {
    url: Url,
    headers: HeaderMap,
    h2c: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Url {
    https: bool,
    address: TargetAddress,
    /// Starts with `/` and includes the query.
    path: String,
}

impl std::fmt::Display for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.https { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.address, self.path)
    }
}

impl HttpGet {
    fn new(
        action: &HTTPGetAction,
        container: &Container,
        ip: Option<IpAddr>,
        purpose: &str,
    ) -> Result<Self, String> {
        let port = target::port(&action.port, container)?;
        let url = Url {
            https: action
                .scheme
                .as_deref()
                .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https")),
            address: TargetAddress::new(action.host.as_deref(), ip, port),
            path: clean_path(action.path.as_deref().unwrap_or_default()),
        };
        let mut headers = HeaderMap::new();
        for header in action.http_headers.iter().flatten() {
            let name = HeaderName::from_bytes(header.name.as_bytes())
                .map_err(|_| format!("net/http: invalid header field name {:?}", header.name))?;
            let value = HeaderValue::from_str(&header.value).map_err(|_| {
                format!("net/http: invalid header field value for {:?}", header.name)
            })?;
            headers.append(name, value);
        }
        let agent = format!("kube-{purpose}/1.37");
        if let Ok(agent) = HeaderValue::from_str(&agent) {
            headers.entry(USER_AGENT).or_insert(agent);
        }
        headers
            .entry(ACCEPT)
            .or_insert(HeaderValue::from_static("*/*"));
        if headers.get(ACCEPT).is_some_and(HeaderValue::is_empty) {
            headers.remove(ACCEPT);
        }
        Ok(Self {
            url,
            headers,
            h2c: action.protocol.as_deref() == Some("HTTP2"),
        })
    }

    /// Fetches the URL and follows redirects within the same host.
    async fn follow<R: ContainerRuntime>(mut self, runtime: &R) -> Result<HttpResponse, String> {
        let first_host = self.url.address.host.clone();
        for _ in 0..=MAX_REDIRECTS {
            let (status, location, body) = self.fetch(runtime).await?;
            let response = HttpResponse { status, body };
            let is_redirect = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
            let Some(location) = location.filter(|_| is_redirect) else {
                return Ok(response);
            };
            let next = self.url.join(&location)?;
            if next.address.host != first_host {
                return Ok(response);
            }
            if location.contains("//") {
                self.headers.remove(HOST);
            }
            self.url = next;
        }
        Err(format!("stopped after {MAX_REDIRECTS} redirects"))
    }

    async fn fetch<R: ContainerRuntime>(
        &self,
        runtime: &R,
    ) -> Result<(StatusCode, Option<String>, String), String> {
        let stream = self.url.address.connect(runtime).await?;
        let response = if self.url.https {
            let stream = tls::connect(stream, &self.url.address.host, false).await?;
            self.send(TokioIo::new(stream)).await?
        } else if self.h2c {
            let request = self.request(false)?;
            grpc::send(TokioIo::new(stream), request).await?
        } else {
            self.send(TokioIo::new(stream)).await?
        };
        let location = response
            .headers()
            .get(LOCATION)
            .and_then(|value| value.to_str().ok())
            .filter(|value| !value.is_empty())
            .map(str::to_owned);
        let status = response.status();
        Ok((status, location, read_body(response).await?))
    }

    async fn send<T>(&self, io: T) -> Result<Response<Incoming>, String>
    where
        T: Read + Write + Unpin + 'static,
    {
        let request = self.request(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
            .await
            .map_err(error_chain)?;
        // Ends with the response's body, because of `Connection: close`.
        super::spawn_connection(connection);
        sender.send_request(request).await.map_err(error_chain)
    }

    fn request(&self, http1: bool) -> Result<Request<Empty<Bytes>>, String> {
        let target = if http1 {
            self.url.path.clone()
        } else {
            self.url.to_string()
        };
        let mut request = Request::get(target)
            .body(Empty::new())
            .map_err(|error| error.to_string())?;
        *request.headers_mut() = self.headers.clone();
        if http1 {
            let host = self.url.host()?;
            request.headers_mut().entry(HOST).or_insert(host);
            request
                .headers_mut()
                .insert(CONNECTION, HeaderValue::from_static("close"));
        } else {
            request.headers_mut().remove(HOST);
        }
        Ok(request)
    }
}

impl Url {
    fn host(&self) -> Result<HeaderValue, String> {
        HeaderValue::from_str(&self.address.to_string()).map_err(|error| error.to_string())
    }

    /// Resolves a `Location` header.
    fn join(&self, location: &str) -> Result<Self, String> {
        let invalid = || format!("failed to parse Location header {location:?}");
        let absolute = if location.starts_with("http://") || location.starts_with("https://") {
            location.to_owned()
        } else if location.starts_with("//") {
            format!("{}:{location}", if self.https { "https" } else { "http" })
        } else if location.contains("://") {
            return Err(format!("unsupported protocol scheme of {location:?}"));
        } else {
            let path = if location.starts_with('/') {
                location.to_owned()
            } else if location.starts_with('?') {
                format!("{}{location}", self.path.split('?').next().unwrap_or("/"))
            } else {
                let here = self.path.split('?').next().unwrap_or("/");
                let folder = here.rsplit_once('/').map_or("", |(folder, _)| folder);
                format!("{folder}/{location}")
            };
            return Ok(Self {
                path: clean_path(&path),
                ..self.clone()
            });
        };
        let uri: http::Uri = absolute.parse().map_err(|_| invalid())?;
        let https = uri.scheme_str() == Some("https");
        let host = uri.host().ok_or_else(invalid)?;
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self {
            https,
            address: TargetAddress::new(Some(host), None, port),
            path: clean_path(path),
        })
    }
}

/// Makes a path valid in a request: adds a leading `/`, removes the fragment, escapes characters.
fn clean_path(path: &str) -> String {
    use std::fmt::Write as _;
    let path = path.split('#').next().unwrap_or_default();
    let mut clean = String::with_capacity(path.len() + 1);
    if !path.starts_with('/') {
        clean.push('/');
    }
    for byte in path.bytes() {
        if byte.is_ascii_graphic() && !br#""<>\^`{|}"#.contains(&byte) {
            clean.push(char::from(byte));
        } else {
            let _ = write!(clean, "%{byte:02X}");
        }
    }
    clean
}

/// Reads at most [`MAX_BODY`] bytes of a response.
async fn read_body(response: Response<Incoming>) -> Result<String, String> {
    let mut body = response.into_body();
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(error_chain)?.into_data() {
            let room = MAX_BODY - read.len();
            read.extend_from_slice(&data[..data.len().min(room)]);
            if read.len() == MAX_BODY {
                break;
            }
        }
    }
    Ok(String::from_utf8_lossy(&read).into_owned())
}

/// The text of an error with its causes.
pub(super) fn error_chain(error: hyper::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(path: &str) -> Url {
        Url {
            https: false,
            address: TargetAddress {
                host: "10.0.0.1".to_owned(),
                port: 8080,
            },
            path: path.to_owned(),
        }
    }

    #[test]
    fn redirect_locations_are_resolved() {
        for (from, location, to) in [
            ("/a/b?x", "c", "http://10.0.0.1:8080/a/c"),
            ("/a/b", "/c?d=e#f", "http://10.0.0.1:8080/c?d=e"),
            ("/a", "?q", "http://10.0.0.1:8080/a?q"),
            ("/a", "https://h/x", "https://h:443/x"),
            ("/a", "//h:1/x", "http://h:1/x"),
            ("/a", "http://[fd00::1]:8/", "http://[fd00::1]:8/"),
        ] {
            let joined = url(from).join(location).expect("a redirect");
            assert_eq!(joined.to_string(), to, "{from} {location}");
        }
        assert!(url("/").join("ftp://x/").is_err());
    }

    #[test]
    fn paths_are_escaped() {
        for (path, clean) in [
            ("", "/"),
            ("x", "/x"),
            ("/a b", "/a%20b"),
            ("/a?b=c#d", "/a?b=c"),
            ("/ü", "/%C3%BC"),
        ] {
            assert_eq!(clean_path(path), clean);
        }
    }
}
