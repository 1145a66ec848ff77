//! The opening handshake of a WebSocket.

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The GUID for `Sec-WebSocket-Accept` (RFC 6455, section 1.3).
const ACCEPT_GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Whether a request asks for a WebSocket, by upstream's criteria.
pub(crate) fn is_websocket(headers: &HeaderMap) -> bool {
    let upgrade = headers.get(header::UPGRADE);
    upgrade.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
        && wants_upgrade(headers)
}

/// Whether a request asks for any upgrade.
fn wants_upgrade(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::CONNECTION).iter();
    values.any(|value| {
        let text = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
        text.contains("upgrade")
    })
}

/// The subprotocols that a client offers, in its order of preference.
pub(crate) fn requested_protocols(headers: &HeaderMap) -> Vec<&str> {
    let values = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|protocol| !protocol.is_empty())
        .collect()
}

/// A successful negotiation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AcceptedUpgrade<T> {
    /// The value for the negotiated protocol in the list of supported ones.
    pub(crate) protocol: T,
    /// The headers of the 101 response.
    pub(crate) headers: HeaderMap,
}

/// Why a handshake fails.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("WebSocket request must be a GET")]
    Method,
    #[error("only version 13 of WebSocket is supported")]
    Version,
    #[error("missing or invalid Sec-WebSocket-Key")]
    Key,
    #[error("requested protocol(s) are not supported: [{requested}]; supports [{supported}]")]
    Protocol {
        requested: String,
        supported: String,
    },
}

/// Accepts a handshake with the first of the client's protocols that is in `supported`. The name "" matches a client that offers none.
pub(crate) fn accept<T: Copy>(
    method: &Method,
    headers: &HeaderMap,
    supported: &[(&'static str, T)],
) -> Result<AcceptedUpgrade<T>, HandshakeError> {
    if method != Method::GET {
        return Err(HandshakeError::Method);
    }
    let version = headers.get(header::SEC_WEBSOCKET_VERSION);
    if version.is_none_or(|version| version != "13") {
        return Err(HandshakeError::Version);
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY);
    let key = key.and_then(|key| key.to_str().ok());
    let key = key.filter(|key| STANDARD.decode(key).is_ok_and(|bytes| bytes.len() == 16));
    let accept_key = accept_key(key.ok_or(HandshakeError::Key)?);

    let mut requested = requested_protocols(headers);
    if requested.is_empty() {
        requested.push("");
    }
    let (name, protocol) =
        select_protocol(&requested, supported).map_err(|(requested, supported)| {
            HandshakeError::Protocol {
                requested,
                supported,
            }
        })?;

    let mut headers = HeaderMap::new();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept_key);
    if !name.is_empty() {
        headers.insert(
            header::SEC_WEBSOCKET_PROTOCOL,
            HeaderValue::from_static(name),
        );
    }
    Ok(AcceptedUpgrade { protocol, headers })
}

/// The first of the client's protocols that the server supports. The error lists those of the client and of the server.
pub(crate) fn select_protocol<T: Copy>(
    client: &[&str],
    supported: &[(&'static str, T)],
) -> Result<(&'static str, T), (String, String)> {
    let find_supported = |name: &&str| supported.iter().find(|(known, _)| known == name);
    client
        .iter()
        .find_map(find_supported)
        .copied()
        .ok_or_else(|| {
            let server: Vec<_> = supported.iter().map(|(name, _)| *name).collect();
            (client.join(" "), server.join(" "))
        })
}

fn accept_key(key: &str) -> HeaderValue {
    let sum = digest(
        &SHA1_FOR_LEGACY_USE_ONLY,
        [key, ACCEPT_GUID].concat().as_bytes(),
    );
    let text = STANDARD.encode(sum);
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(protocols: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (header::UPGRADE, "WebSocket"),
            (header::CONNECTION, "keep-alive, Upgrade"),
            (header::SEC_WEBSOCKET_VERSION, "13"),
            (header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ=="),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        for protocol in protocols {
            let value = HeaderValue::from_static(protocol);
            headers.append(header::SEC_WEBSOCKET_PROTOCOL, value);
        }
        headers
    }

    const SUPPORTED: &[(&str, u8)] = &[("", 0), ("v4.channel.k8s.io", 4), ("v5.channel.k8s.io", 5)];

    #[test]
    fn accepts_the_example_of_the_rfc() {
        let headers = request(&[]);
        assert!(is_websocket(&headers));
        let accepted = accept(&Method::GET, &headers, SUPPORTED).unwrap();
        assert_eq!(accepted.protocol, 0);
        let accept_key = &accepted.headers[header::SEC_WEBSOCKET_ACCEPT];
        assert_eq!(accept_key, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert!(
            !accepted
                .headers
                .contains_key(header::SEC_WEBSOCKET_PROTOCOL)
        );
    }

    #[test]
    fn first_supported_protocol_of_the_client_is_chosen() {
        let negotiated = |protocols: &[&'static str]| {
            accept(&Method::GET, &request(protocols), SUPPORTED).map(|accepted| accepted.protocol)
        };
        assert_eq!(negotiated(&["v5.channel.k8s.io,v4.channel.k8s.io"]), Ok(5));
        assert_eq!(
            negotiated(&["v4.channel.k8s.io", "v5.channel.k8s.io"]),
            Ok(4)
        );
        assert_eq!(negotiated(&["other, v4.channel.k8s.io"]), Ok(4));
        assert_eq!(
            negotiated(&["other"]).unwrap_err().to_string(),
            "requested protocol(s) are not supported: [other]; \
             supports [ v4.channel.k8s.io v5.channel.k8s.io]"
        );
    }

    #[test]
    fn invalid_handshakes_are_rejected() {
        let mut headers = request(&[]);
        let error = |method, headers: &HeaderMap| accept(&method, headers, SUPPORTED).unwrap_err();
        assert_eq!(error(Method::POST, &headers), HandshakeError::Method);
        headers.insert(header::SEC_WEBSOCKET_KEY, HeaderValue::from_static("short"));
        assert_eq!(error(Method::GET, &headers), HandshakeError::Key);
        headers.remove(header::SEC_WEBSOCKET_VERSION);
        assert_eq!(error(Method::GET, &headers), HandshakeError::Version);
        headers.remove(header::CONNECTION);
        assert!(!is_websocket(&headers));
    }
}
