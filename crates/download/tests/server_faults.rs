//! Downloads from servers that stall, send another range, or redirect.

// Clippy's exception for tests does not apply to helpers of integration tests.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use download::{Digest, DownloadError, DownloadFailure, FileSize, PartialFile};
use reqwest::Url;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const WHOLE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789";
const STALLS: &str = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n01";
const REST: &str =
    "HTTP/1.1 206 Rest\r\nContent-Range: bytes 2-9/10\r\nContent-Length: 8\r\n\r\n23456789";
const ANOTHER_RANGE: &str =
    "HTTP/1.1 206 Rest\r\nContent-Range: bytes 3-9/10\r\nContent-Length: 7\r\n\r\n3456789";

/// Answers the n-th connection with the n-th response and leaves it open. Returns the requests.
async fn serve(responses: &[&str]) -> (Url, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::<Mutex<Vec<String>>>::default();
    let (log, responses) = (requests.clone(), responses.join("\0"));
    tokio::spawn(async move {
        let mut open = Vec::new();
        for response in responses.split('\0') {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            let request = String::from_utf8_lossy(&request[..length]).to_lowercase();
            log.lock().unwrap().push(request);
            stream.write_all(response.as_bytes()).await.unwrap();
            open.push(stream);
        }
    });
    (Url::parse(&url).unwrap(), requests)
}

async fn download(url: &Url) -> Result<(), DownloadError<Infallible>> {
    let client = download::client_builder()
        .pool_max_idle_per_host(0)
        .read_timeout(Duration::from_millis(200));
    let client = client.build().unwrap();
    let request = async |headers| {
        let request = client.get(url.clone()).headers(headers);
        request.send().await.map_err(DownloadFailure::connection)
    };
    let (digest, size) = (Digest::of(b"0123456789"), FileSize::AtMost(10));
    let mut part = PartialFile::resume(tempfile::tempfile().unwrap()).unwrap();
    download::download(request, digest, size, &mut part, |_| {}).await
}

#[tokio::test]
async fn stalled_download_is_resumed() {
    let (url, requests) = serve(&[STALLS, REST]).await;
    download(&url).await.unwrap();
    assert!(requests.lock().unwrap()[1].contains("range: bytes=2-\r\n"));
}

#[tokio::test]
async fn another_range_restarts_the_download() {
    let (url, requests) = serve(&[STALLS, ANOTHER_RANGE, WHOLE]).await;
    download(&url).await.unwrap();
    assert!(!requests.lock().unwrap()[2].contains("range:"));
}

#[tokio::test]
async fn redirect_to_another_server_carries_no_credentials() {
    let (target, redirected) = serve(&[WHOLE]).await;
    let found = format!("HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n");
    let (mut url, requests) = serve(&[&found]).await;
    url.set_username("user").unwrap();
    url.set_password(Some("secret")).unwrap();
    download(&url).await.unwrap();
    assert!(requests.lock().unwrap()[0].contains("authorization: basic"));
    let redirected = &redirected.lock().unwrap()[0];
    for header in ["authorization:", "referer:"] {
        assert!(!redirected.contains(header), "{redirected}");
    }
}
