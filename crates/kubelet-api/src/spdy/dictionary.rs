//! The zlib dictionary of SPDY/3 header blocks.

use std::sync::LazyLock;

/// The words of the dictionary, each preceded by its length in four bytes.
#[rustfmt::skip]
const WORDS: &[&str] = &[
    "options", "head", "post", "put", "delete", "trace", "accept", "accept-charset", "accept-encoding",
    "accept-language", "accept-ranges", "age", "allow", "authorization", "cache-control", "connection",
    "content-base", "content-encoding", "content-language", "content-length", "content-location", "content-md5",
    "content-range", "content-type", "date", "etag", "expect", "expires", "from", "host", "if-match",
    "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified", "location",
    "max-forwards", "pragma", "proxy-authenticate", "proxy-authorization", "range", "referer", "retry-after",
    "server", "te", "trailer", "transfer-encoding", "upgrade", "user-agent", "vary", "via", "warning",
    "www-authenticate", "method", "get", "status", "200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie",
    "keep-alive", "origin",
];

/// The rest of the dictionary, without lengths.
const TAIL: &str = "\
    100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Au\
    thoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidd\
    en404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr Ma\
    y Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,imag\
    e/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,publicpri\
    vatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

/// The whole dictionary.
pub(super) static DICTIONARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut dictionary = Vec::with_capacity(1423);
    for word in WORDS {
        // Every length fits into one byte.
        dictionary.extend([0, 0, 0, word.len() as u8]);
        dictionary.extend(word.as_bytes());
    }
    dictionary.extend(TAIL.as_bytes());
    dictionary
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_the_specification() {
        // The Adler-32 checksum, by which zlib identifies the dictionary.
        let (mut a, mut b) = (1_u32, 0_u32);
        for byte in DICTIONARY.iter() {
            a = (a + u32::from(*byte)) % 65521;
            b = (b + a) % 65521;
        }
        assert_eq!(DICTIONARY.len(), 1423);
        assert_eq!((b << 16) | a, 0xe3c6_a7c2);
    }
}
