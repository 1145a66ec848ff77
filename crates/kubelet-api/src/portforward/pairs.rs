//! Pairs the streams of a client: each forwarded connection has a data stream and an error stream.

use std::collections::HashMap;

use super::ports;
use crate::streams::{Headers, StreamId};

/// The type of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamType {
    Data,
    Error,
}

/// The port-forward headers of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StreamLabel {
    pub(super) port: u16,
    pub(super) stream_type: StreamType,
    pub(super) request: String,
}

impl StreamLabel {
    /// Parses the headers; `None` if one is missing or invalid.
    pub(super) fn read(stream: StreamId, headers: &Headers) -> Option<Self> {
        let port = ports::number(headers.get("port")?).ok()?;
        let stream_type = match headers.get("streamType")? {
            "data" => StreamType::Data,
            "error" => StreamType::Error,
            _ => return None,
        };
        let request = match headers.get("requestID") {
            Some(request) if !request.is_empty() => request.to_owned(),
            // Very old clients send no request id. They open the error stream right before the data stream.
            _ => match stream_type {
                StreamType::Error => stream.to_string(),
                StreamType::Data => stream.saturating_sub(2).to_string(),
            },
        };
        Some(Self {
            port,
            stream_type,
            request,
        })
    }
}

/// Streams whose counterpart is not open yet, by request id.
#[derive(Debug)]
pub(super) struct StreamPairs<S> {
    waiting: HashMap<String, (StreamLabel, S)>,
}

/// The result of [`StreamPairs::add`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PairOutcome<S> {
    /// The counterpart is not open yet.
    Waiting,
    /// Both streams are open.
    Pair { port: u16, data: S, error: S },
    /// The request already has a stream of this type.
    Duplicate(S),
}

impl<S> StreamPairs<S> {
    pub(super) fn new() -> Self {
        let waiting = HashMap::new();
        Self { waiting }
    }

    pub(super) fn add(&mut self, label: StreamLabel, stream: S) -> PairOutcome<S> {
        let Some((other, waiting)) = self.waiting.remove(&label.request) else {
            self.waiting.insert(label.request.clone(), (label, stream));
            return PairOutcome::Waiting;
        };
        match (other.stream_type, label.stream_type) {
            (StreamType::Error, StreamType::Data) => PairOutcome::Pair {
                port: label.port,
                data: stream,
                error: waiting,
            },
            (StreamType::Data, StreamType::Error) => PairOutcome::Pair {
                port: other.port,
                data: waiting,
                error: stream,
            },
            _ => {
                self.waiting.insert(label.request, (other, waiting));
                PairOutcome::Duplicate(stream)
            }
        }
    }

    /// Removes a request that is still incomplete.
    pub(super) fn expire(&mut self, request: &str) -> Option<(StreamType, S)> {
        let (label, stream) = self.waiting.remove(request)?;
        Some((label.stream_type, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(stream: StreamId, headers: &[(&str, &str)]) -> Option<StreamLabel> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        StreamLabel::read(stream, &Headers::new(headers.iter().map(owned).collect()))
    }

    fn of(stream: StreamId, stream_type: &str, request: &str) -> StreamLabel {
        let headers = [
            ("port", "80"),
            ("streamtype", stream_type),
            ("requestid", request),
        ];
        label(stream, &headers).unwrap()
    }

    #[test]
    fn streams_are_paired_in_any_order() {
        let mut pairs = StreamPairs::new();
        assert_eq!(pairs.add(of(1, "error", "0"), 1), PairOutcome::Waiting);
        assert_eq!(pairs.add(of(3, "data", "1"), 3), PairOutcome::Waiting);
        let found = |data, error| PairOutcome::Pair {
            port: 80,
            data,
            error,
        };
        assert_eq!(pairs.add(of(5, "error", "1"), 5), found(3, 5));
        assert_eq!(pairs.add(of(7, "data", "0"), 7), found(7, 1));
        assert_eq!(pairs.expire("0"), None);
    }

    #[test]
    fn second_stream_of_the_same_type_is_rejected() {
        let mut pairs = StreamPairs::new();
        assert_eq!(pairs.add(of(1, "error", "0"), 1), PairOutcome::Waiting);
        assert_eq!(pairs.add(of(3, "error", "0"), 3), PairOutcome::Duplicate(3));
        assert_eq!(pairs.expire("0"), Some((StreamType::Error, 1)));
    }

    #[test]
    fn streams_without_request_id_are_paired() {
        let error = label(5, &[("port", "80"), ("streamtype", "error")]).unwrap();
        let data = label(7, &[("port", "80"), ("streamtype", "data")]).unwrap();
        assert_eq!(error.request, data.request);
    }

    #[test]
    fn incomplete_headers_are_rejected() {
        assert_eq!(label(1, &[("streamtype", "data")]), None);
        assert_eq!(label(1, &[("port", "80")]), None);
        assert_eq!(label(1, &[("port", "0"), ("streamtype", "data")]), None);
        assert_eq!(label(1, &[("port", "80"), ("streamtype", "stdin")]), None);
    }
}
