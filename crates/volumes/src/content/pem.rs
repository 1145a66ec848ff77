//! Certificates in PEM. The parser is as lenient as the API server's.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The PEM label of a certificate.
pub const CERTIFICATE: &str = "CERTIFICATE";
/// The line length of base64 in PEM.
const LINE: usize = 64;

/// The certificates in a text, as DER. Skips text between blocks, headers in blocks, and other types of blocks.
pub fn certificates(text: &str) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut lines = text.lines().map(str::trim_end);
    while let Some(line) = lines.next() {
        if line != "-----BEGIN CERTIFICATE-----" {
            continue;
        }
        let mut body = String::new();
        let mut ended = false;
        for line in lines.by_ref() {
            if line.starts_with("-----") {
                ended = line == "-----END CERTIFICATE-----";
                break;
            }
            // A header such as `Proc-Type: 4,ENCRYPTED`; base64 contains no colon.
            if !line.contains(':') {
                body.push_str(line.trim());
            }
        }
        if ended && let Ok(der) = STANDARD.decode(&body) {
            found.push(der);
        }
    }
    found
}

/// Encodes a PEM block.
pub fn encode(label: &str, der: &[u8]) -> String {
    let body = STANDARD.encode(der);
    let mut text = format!("-----BEGIN {label}-----\n");
    let mut rest = body.as_str();
    while !rest.is_empty() {
        // Base64 is ASCII, so every index is a character boundary.
        let (line, more) = rest.split_at(rest.len().min(LINE));
        text.push_str(line);
        text.push('\n');
        rest = more;
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_certificates_round_trip() {
        for size in [1, 47, 48, 49, 1000] {
            let der: Vec<u8> = (0..size).map(|byte| (byte % 251) as u8).collect();
            let text = encode(CERTIFICATE, &der);
            assert!(text.lines().all(|line| line.len() <= 64), "{text}");
            assert_eq!(certificates(&text), [der]);
        }
    }

    #[test]
    fn other_blocks_and_text_are_skipped() {
        let text = "subject: one\r\n-----BEGIN CERTIFICATE-----\r\nAP8=\r\n-----END CERTIFICATE-----\r\n\
            between\n\
            -----BEGIN PRIVATE KEY-----\nAQ==\n-----END PRIVATE KEY-----\n\
            -----BEGIN CERTIFICATE-----\nName: value\nOther: 1\n\nAg\n==\n\n-----END CERTIFICATE-----\n\
            -----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n\
            -----BEGIN CERTIFICATE-----\nAw==\n-----END SOMETHING-----\n\
            -----BEGIN CERTIFICATE-----\nBA==\n-----END CERTIFICATE-----";
        assert_eq!(certificates(text), [vec![0, 255], vec![2], vec![4]]);
        assert_eq!(
            certificates("-----BEGIN CERTIFICATE-----\nAP8="),
            Vec::<Vec<u8>>::new()
        );
    }
}
