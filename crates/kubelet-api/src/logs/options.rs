//! Parses the query of a log request, like upstream's decoder and validation.

use std::borrow::Cow;
use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};

use super::ContainerLogsError;
use crate::pod_source::{LogOptions, LogStream};

/// Parses a query string. `sinceSeconds` is relative to `now`.
pub(super) fn parse(
    container: &str,
    query: &str,
    now: Timestamp,
) -> Result<LogOptions, ContainerLogsError> {
    let query = Query::of(query);

    let tail_lines = match query.get("tail") {
        // The older name of tailLines takes precedence.
        Some("all") => None,
        Some(tail) if !tail.is_empty() => Some(parse_number(tail)?),
        _ => query.number("tailLines")?,
    };
    let limit_bytes = query.number("limitBytes")?;
    let since_seconds = query.number("sinceSeconds")?;
    let since_time = match query.get("sinceTime") {
        None => None,
        Some("" | "null") => Some(Timestamp::MIN),
        Some(time) => Some(time.parse().map_err(|_| ContainerLogsError::Undecodable)?),
    };

    let stream = match query.get("stream") {
        None | Some("All") => LogStream::All,
        // Upstream does not support tailLines for a single stream.
        Some(_) if tail_lines.is_some() => return Err(ContainerLogsError::Invalid),
        Some("Stdout") => LogStream::Stdout,
        Some("Stderr") => LogStream::Stderr,
        Some(_) => return Err(ContainerLogsError::Invalid),
    };
    let since = match (since_seconds, since_time) {
        (Some(_), Some(_)) => return Err(ContainerLogsError::Invalid),
        (Some(seconds), None) if seconds < 1 => return Err(ContainerLogsError::Invalid),
        // Before the earliest timestamp: the whole log.
        (Some(seconds), None) => Some(
            now.checked_sub(SignedDuration::from_secs(seconds))
                .unwrap_or(Timestamp::MIN),
        ),
        (None, since) => since,
    };

    Ok(LogOptions {
        container: container.to_owned(),
        previous: query.flag("previous"),
        follow: query.flag("follow"),
        tail_lines: at_least(0, tail_lines)?,
        since,
        timestamps: query.flag("timestamps"),
        limit_bytes: at_least(1, limit_bytes)?,
        stream,
    })
}

/// The first value of each parameter.
struct Query<'a>(HashMap<Cow<'a, str>, Cow<'a, str>>);

impl<'a> Query<'a> {
    fn of(query: &'a str) -> Self {
        let mut values = HashMap::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            values.entry(name).or_insert(value);
        }
        Self(values)
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(AsRef::as_ref)
    }

    /// Like upstream: every value except "0" and "false" is true.
    fn flag(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
    }

    fn number(&self, name: &str) -> Result<Option<i64>, ContainerLogsError> {
        self.get(name).map(parse_number).transpose()
    }
}

fn parse_number(text: &str) -> Result<i64, ContainerLogsError> {
    text.parse().map_err(|_| ContainerLogsError::Undecodable)
}

fn at_least(minimum: i64, value: Option<i64>) -> Result<Option<u64>, ContainerLogsError> {
    match value {
        Some(value) if value < minimum => Err(ContainerLogsError::Invalid),
        value => Ok(value.and_then(|value| value.try_into().ok())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn now() -> Timestamp {
        "2026-11-16T12:00:00Z".parse().unwrap()
    }

    fn parsed(query: &str) -> LogOptions {
        parse("c", query, now()).unwrap()
    }

    fn rejected(query: &str) -> ContainerLogsError {
        parse("c", query, now()).unwrap_err()
    }

    #[test]
    fn empty_query_selects_the_whole_log() {
        let options = parsed("");
        assert_eq!(options.container, "c");
        assert!(!options.follow && !options.previous && !options.timestamps);
        assert_eq!(options.stream, LogStream::All);
        assert_eq!(
            (options.tail_lines, options.since, options.limit_bytes),
            (None, None, None)
        );
    }

    #[test]
    fn parses_all_parameters() {
        let options = parsed(
            "follow=true&previous=1&timestamps=&tailLines=10&limitBytes=4096&sinceSeconds=60&stream=All",
        );
        assert!(options.follow && options.previous && options.timestamps);
        assert_eq!(options.tail_lines, Some(10));
        assert_eq!(options.limit_bytes, Some(4096));
        assert_eq!(options.since, Some("2026-11-16T11:59:00Z".parse().unwrap()));
        assert_eq!(parsed("stream=Stderr").stream, LogStream::Stderr);
        let since = parsed("sinceTime=2026-11-16T10%3A00%3A00%2B01%3A00").since;
        assert_eq!(since, Some("2026-11-16T09:00:00Z".parse().unwrap()));
    }

    #[test]
    fn flags_are_parsed_like_upstream() {
        assert!(!parsed("follow=false").follow);
        assert!(!parsed("follow=FALSE").follow);
        assert!(!parsed("follow=0").follow);
        assert!(parsed("follow=whatever").follow);
        assert!(parsed("follow=true&follow=false").follow);
    }

    #[test]
    fn tail_takes_precedence_over_tail_lines() {
        assert_eq!(parsed("tail=5&tailLines=7").tail_lines, Some(5));
        assert_eq!(parsed("tail=all&tailLines=7").tail_lines, None);
    }

    #[test]
    fn invalid_parameters_are_rejected() {
        assert_eq!(rejected("tailLines=ten"), ContainerLogsError::Undecodable);
        assert_eq!(
            rejected("sinceTime=yesterday"),
            ContainerLogsError::Undecodable
        );
        assert_eq!(rejected("tailLines=-1"), ContainerLogsError::Invalid);
        assert_eq!(rejected("limitBytes=0"), ContainerLogsError::Invalid);
        assert_eq!(rejected("sinceSeconds=0"), ContainerLogsError::Invalid);
        assert_eq!(rejected("stream=stdout"), ContainerLogsError::Invalid);
        assert_eq!(
            rejected("stream=Stdout&tailLines=1"),
            ContainerLogsError::Invalid
        );
        assert_eq!(
            rejected("sinceSeconds=1&sinceTime=2026-11-16T10:00:00Z"),
            ContainerLogsError::Invalid
        );
    }

    #[test]
    fn huge_since_seconds_selects_the_whole_log() {
        let since = parsed(&format!("sinceSeconds={}", i64::MAX)).since;
        assert_eq!(since, Some(Timestamp::MIN));
    }

    proptest! {
        #[test]
        fn arbitrary_query_never_panics(query in "(tailLines|sinceTime|limitBytes|sinceSeconds|[a-z%&=]{0,9})=.{0,20}") {
            let _ = parse("c", &query, now());
        }
    }
}
