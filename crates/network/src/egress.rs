//! The API server's egress proxy: an HTTP CONNECT proxy on a Unix socket.
//!
//! kube-apiserver connects through it to nodes, pods and services (its "egress selector"). The proxy connects to nodes over
//! the host's network; pods and services will be reached through this node's hub. The permissions of the socket's
//! directory control access.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;

/// Maximum length of the request line and headers.
const MAX_REQUEST: usize = 8 * 1024;
/// Buffer size for each direction of a tunnel.
const BUFFER_SIZE: usize = 64 * 1024;
/// Timeout for a client's request.
const CONNECT_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the connection to the target.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A listening proxy; [`serve`](Self::serve) handles its connections.
#[derive(Debug)]
pub struct EgressProxy {
    listener: UnixListener,
}

impl EgressProxy {
    /// Creates the socket `path` and listens on it.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        Ok(Self { listener })
    }

    /// Serves until the task is dropped.
    pub async fn serve(self) {
        loop {
            match self.listener.accept().await {
                Ok((client, _)) => {
                    tokio::spawn(async move {
                        if let Err(error) = tunnel(client).await {
                            tracing::debug!(%error, "egress connection ended");
                        }
                    });
                }
                Err(error) => {
                    // Mostly EMFILE, which is transient.
                    tracing::warn!(%error, "egress proxy failed to accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

async fn tunnel(mut client: UnixStream) -> io::Result<()> {
    let (target, body) = match timeout(CONNECT_REQUEST_TIMEOUT, read_request(&mut client)).await {
        Ok(Ok(request)) => request,
        Ok(Err(problem)) => return respond_error(&mut client, "400 Bad Request", &problem).await,
        Err(_) => return respond_error(&mut client, "408 Request Timeout", "no request").await,
    };
    let mut server = match timeout(CONNECT_TIMEOUT, TcpStream::connect(target)).await {
        Ok(Ok(server)) => server,
        Ok(Err(error)) => {
            let problem = format!("cannot connect to {target}: {error}");
            return respond_error(&mut client, "502 Bad Gateway", &problem).await;
        }
        Err(_) => {
            let problem = format!("connection to {target} timed out");
            return respond_error(&mut client, "504 Gateway Timeout", &problem).await;
        }
    };
    server.set_nodelay(true)?;
    client
        .write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
        .await?;
    server.write_all(&body).await?;
    copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER_SIZE, BUFFER_SIZE).await?;
    Ok(())
}

/// Reads up to the end of the headers. Returns the target and the bytes after the headers.
async fn read_request(client: &mut UnixStream) -> Result<(SocketAddr, Vec<u8>), String> {
    let mut received = Vec::new();
    loop {
        let mut chunk = [0; 1024];
        let count = client
            .read(&mut chunk)
            .await
            .map_err(|error| error.to_string())?;
        if count == 0 {
            return Err("the request is incomplete".to_owned());
        }
        received.extend_from_slice(&chunk[..count]);
        if let Some(end) = find_end_of_headers(&received) {
            let body = received.split_off(end);
            return Ok((parse_connect(&received)?, body));
        }
        if received.len() > MAX_REQUEST {
            return Err("the request is too long".to_owned());
        }
    }
}

fn find_end_of_headers(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .map(|at| at + 4)
}

/// Parses the target of `CONNECT host:port HTTP/1.1`. The host must be an IP address, as the API server sends it for nodes.
fn parse_connect(request: &[u8]) -> Result<SocketAddr, String> {
    let line = request
        .split(|byte| *byte == b'\r')
        .next()
        .unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| "the request is not UTF-8".to_owned())?;
    match line.split(' ').collect::<Vec<_>>().as_slice() {
        ["CONNECT", target, "HTTP/1.1" | "HTTP/1.0"] => target
            .parse()
            .map_err(|_| format!("{target:?} is not an address and a port")),
        _ => Err("only CONNECT is supported".to_owned()),
    }
}

async fn respond_error(client: &mut UnixStream, status: &str, problem: &str) -> io::Result<()> {
    let length = problem.len();
    let response = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{problem}");
    client.write_all(response.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    async fn proxy() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("egress.sock");
        let proxy = EgressProxy::bind(&path).unwrap();
        tokio::spawn(proxy.serve());
        (dir, path)
    }

    async fn request(path: &Path, request: &[u8]) -> String {
        let mut client = UnixStream::connect(path).await.unwrap();
        client.write_all(request).await.unwrap();
        client.shutdown().await.unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn tunnel_forwards_bytes_sent_with_the_request() {
        let (_dir, path) = proxy().await;
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = server.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut received = [0; 5];
            stream.read_exact(&mut received).await.unwrap();
            stream.write_all(b"echo: ").await.unwrap();
            stream.write_all(&received).await.unwrap();
        });
        let text = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\nhello");
        let response = request(&path, text.as_bytes()).await;
        assert_eq!(
            response,
            "HTTP/1.1 200 Connection established\r\n\r\necho: hello"
        );
    }

    #[tokio::test]
    async fn invalid_requests_get_an_error_response() {
        let (_dir, path) = proxy().await;
        for (text, expected) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], "only CONNECT"),
            (b"CONNECT nowhere:x HTTP/1.1\r\n\r\n", "not an address"),
            (b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n", "cannot connect"),
            (b"\xff\xfe\r\n\r\n", "not UTF-8"),
            (b"CONNECT", "incomplete"),
            (&[b'x'; MAX_REQUEST + 1], "too long"),
        ] {
            let response = request(&path, text).await;
            assert!(
                response.contains(expected),
                "{response:?} lacks {expected:?}"
            );
        }
    }
}
