//! A forwarded connection is two streams of the client's: one for data, one for what went wrong. This finds those that belong
//! together.

use std::collections::HashMap;

use super::ports;
use crate::streams::{Headers, StreamId};

/// What a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamType {
    Data,
    Error,
}

/// What the headers of a stream say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StreamLabel {
    pub(super) port: u16,
    pub(super) stream_type: StreamType,
    pub(super) request: String,
}

impl StreamLabel {
    /// Nothing if the headers don't say what must be said.
    pub(super) fn read(stream: StreamId, headers: &Headers) -> Option<Self> {
        let port = ports::number(headers.get("port")?).ok()?;
        let stream_type = match headers.get("streamType")? {
            "data" => StreamType::Data,
            "error" => StreamType::Error,
            _ => return None,
        };
        let request = match headers.get("requestID") {
            Some(request) if !request.is_empty() => request.to_owned(),
            // Clients of the first days name no request: they open the error stream, and then the data stream.
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

/// Streams that wait for their other half.
#[derive(Debug)]
pub(super) struct StreamPairs<S> {
    waiting: HashMap<String, (StreamLabel, S)>,
}

/// What becomes of a new stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PairOutcome<S> {
    /// It waits for its other half.
    Waiting,
    /// It has found it.
    Pair { port: u16, data: S, error: S },
    /// There is one of its kind already.
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

    /// Gives up on a request, if it still waits.
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
    fn halves_find_each_other_in_any_order() {
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
    fn a_request_has_one_stream_of_each_kind() {
        let mut pairs = StreamPairs::new();
        assert_eq!(pairs.add(of(1, "error", "0"), 1), PairOutcome::Waiting);
        assert_eq!(pairs.add(of(3, "error", "0"), 3), PairOutcome::Duplicate(3));
        assert_eq!(pairs.expire("0"), Some((StreamType::Error, 1)));
    }

    #[test]
    fn clients_of_the_first_days_name_no_request() {
        let error = label(5, &[("port", "80"), ("streamtype", "error")]).unwrap();
        let data = label(7, &[("port", "80"), ("streamtype", "data")]).unwrap();
        assert_eq!(error.request, data.request);
    }

    #[test]
    fn what_is_no_label_is_none() {
        assert_eq!(label(1, &[("streamtype", "data")]), None);
        assert_eq!(label(1, &[("port", "80")]), None);
        assert_eq!(label(1, &[("port", "0"), ("streamtype", "data")]), None);
        assert_eq!(label(1, &[("port", "80"), ("streamtype", "stdin")]), None);
    }
}
