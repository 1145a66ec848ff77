//! A forwarded connection is two streams of the client's: one for data, one for what went wrong. This finds those that belong
//! together.

use std::collections::HashMap;

use super::ports;
use crate::streams::{Headers, StreamId};

/// What a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Data,
    Error,
}

/// What the headers of a stream say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) port: u16,
    pub(super) purpose: Purpose,
    pub(super) request: String,
}

impl Label {
    /// Nothing if the headers don't say what must be said.
    pub(super) fn read(stream: StreamId, headers: &Headers) -> Option<Self> {
        let port = ports::number(headers.get("port")?).ok()?;
        let purpose = match headers.get("streamType")? {
            "data" => Purpose::Data,
            "error" => Purpose::Error,
            _ => return None,
        };
        let request = match headers.get("requestID") {
            Some(request) if !request.is_empty() => request.to_owned(),
            // Clients of the first days name no request: they open the error stream, and then the data stream.
            _ => match purpose {
                Purpose::Error => stream.to_string(),
                Purpose::Data => stream.saturating_sub(2).to_string(),
            },
        };
        Some(Self {
            port,
            purpose,
            request,
        })
    }
}

/// Streams that wait for their other half.
#[derive(Debug)]
pub(super) struct Pairs<S> {
    waiting: HashMap<String, (Label, S)>,
}

/// What becomes of a new stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Added<S> {
    /// It waits for its other half.
    Waits,
    /// It has found it.
    Pair { port: u16, data: S, error: S },
    /// There is one of its kind already.
    Twice(S),
}

impl<S> Pairs<S> {
    pub(super) fn new() -> Self {
        let waiting = HashMap::new();
        Self { waiting }
    }

    pub(super) fn add(&mut self, label: Label, stream: S) -> Added<S> {
        let Some((other, waiting)) = self.waiting.remove(&label.request) else {
            self.waiting.insert(label.request.clone(), (label, stream));
            return Added::Waits;
        };
        match (other.purpose, label.purpose) {
            (Purpose::Error, Purpose::Data) => Added::Pair {
                port: label.port,
                data: stream,
                error: waiting,
            },
            (Purpose::Data, Purpose::Error) => Added::Pair {
                port: other.port,
                data: waiting,
                error: stream,
            },
            _ => {
                self.waiting.insert(label.request, (other, waiting));
                Added::Twice(stream)
            }
        }
    }

    /// Gives up on a request, if it still waits.
    pub(super) fn give_up(&mut self, request: &str) -> Option<(Purpose, S)> {
        let (label, stream) = self.waiting.remove(request)?;
        Some((label.purpose, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(stream: StreamId, headers: &[(&str, &str)]) -> Option<Label> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Label::read(stream, &Headers::new(headers.iter().map(owned).collect()))
    }

    fn of(stream: StreamId, purpose: &str, request: &str) -> Label {
        let headers = [
            ("port", "80"),
            ("streamtype", purpose),
            ("requestid", request),
        ];
        label(stream, &headers).unwrap()
    }

    #[test]
    fn halves_find_each_other_in_any_order() {
        let mut pairs = Pairs::new();
        assert_eq!(pairs.add(of(1, "error", "0"), 1), Added::Waits);
        assert_eq!(pairs.add(of(3, "data", "1"), 3), Added::Waits);
        let found = |data, error| Added::Pair {
            port: 80,
            data,
            error,
        };
        assert_eq!(pairs.add(of(5, "error", "1"), 5), found(3, 5));
        assert_eq!(pairs.add(of(7, "data", "0"), 7), found(7, 1));
        assert_eq!(pairs.give_up("0"), None);
    }

    #[test]
    fn a_request_has_one_stream_of_each_kind() {
        let mut pairs = Pairs::new();
        assert_eq!(pairs.add(of(1, "error", "0"), 1), Added::Waits);
        assert_eq!(pairs.add(of(3, "error", "0"), 3), Added::Twice(3));
        assert_eq!(pairs.give_up("0"), Some((Purpose::Error, 1)));
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
