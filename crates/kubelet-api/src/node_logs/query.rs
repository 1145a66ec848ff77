//! Upstream's node log query: `query`, `sinceTime`, `untilTime`, `tailLines`, `pattern`, `boot`.

use std::str::FromStr;

use jiff::Timestamp;
use regex::Regex;

use crate::stats::LogLine;

/// Upstream's limit for `tailLines`.
const MAX_LINES: i64 = 100_000;
/// Upstream's limit for services in one query.
const MAX_SERVICES: usize = 4;
/// Limit for a compiled pattern, in bytes.
const MAX_PATTERN_SIZE: usize = 1 << 20;
/// Upstream's messages about values that cannot be parsed.
const TIME_FORMAT: &str = "invalid time format";
const NOT_A_NUMBER: &str = "not a number";

/// Why a query is rejected, with the message for the client.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NodeLogsError {
    /// A parameter cannot be parsed.
    Undecodable(String),
    /// A parameter has a value that is not allowed.
    Invalid(String),
}

/// A valid query.
#[derive(Debug, Default)]
pub(super) struct NodeLogsQuery {
    pub services: Vec<String>,
    pub files: Vec<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    tail: Option<usize>,
    pattern: Option<Regex>,
    /// The query asks for an earlier boot, of which there is no log.
    pub earlier_boot: bool,
}

/// Parses the query string of a request; `None` if it has no log query, so that the path selects a file or the directory.
pub(super) fn parse(text: &str) -> Result<Option<NodeLogsQuery>, NodeLogsError> {
    let mut query = NodeLogsQuery::default();
    let (mut has_query, mut has_options) = (false, false);
    let mut queries = Vec::new();
    for (name, value) in form_urlencoded::parse(text.as_bytes()) {
        match (&*name, &*value) {
            ("query", value) => {
                has_query = true;
                queries.push(format!("{value:?}"));
                if value.contains(['/', '\\']) {
                    query.files.push(value.to_owned());
                } else if !value.trim().is_empty() {
                    query.services.push(value.to_owned());
                }
            }
            (_, "") => {}
            ("sinceTime", value) => query.since = Some(parse_value(&name, value, TIME_FORMAT)?),
            ("untilTime", value) => query.until = Some(parse_value(&name, value, TIME_FORMAT)?),
            ("tailLines", value) => query.tail = parse_tail(value)?,
            ("boot", value) => query.earlier_boot = parse_boot(value)?,
            ("pattern", value) => query.pattern = Some(parse_pattern(value)?),
            _ => continue,
        }
        has_options = true;
    }
    let selects_nothing = query.services.is_empty() && query.files.is_empty();
    if has_query && selects_nothing {
        return Err(NodeLogsError::Undecodable(format!(
            "query: Invalid value: [{}]: may not be empty",
            queries.join(", ")
        )));
    }
    if !has_options {
        return Ok(None);
    }
    query.check(selects_nothing)?;
    Ok(Some(query))
}

fn parse_value<T: FromStr>(name: &str, value: &str, problem: &str) -> Result<T, NodeLogsError> {
    value.parse().map_err(|_| {
        NodeLogsError::Undecodable(format!("{name}: Invalid value: {value:?}: {problem}"))
    })
}

fn parse_tail(value: &str) -> Result<Option<usize>, NodeLogsError> {
    let lines: i64 = parse_value("tailLines", value, NOT_A_NUMBER)?;
    if !(0..=MAX_LINES).contains(&lines) {
        return Err(NodeLogsError::Invalid(format!(
            "tailLines: Invalid value: {lines}: must be between 0 and {MAX_LINES}, inclusive"
        )));
    }
    Ok(usize::try_from(lines).ok())
}

/// Whether the option asks for an earlier boot than the current one.
fn parse_boot(value: &str) -> Result<bool, NodeLogsError> {
    let boot: i64 = parse_value("boot", value, NOT_A_NUMBER)?;
    if boot > 0 {
        return Err(NodeLogsError::Invalid(format!(
            "boot: Invalid value: {boot}: must be less than 1"
        )));
    }
    Ok(boot < 0)
}

fn parse_pattern(value: &str) -> Result<Regex, NodeLogsError> {
    let pattern = regex::RegexBuilder::new(value)
        .size_limit(MAX_PATTERN_SIZE)
        .build();
    pattern.map_err(|error| {
        NodeLogsError::Invalid(format!("pattern: Invalid value: {value:?}: {error}"))
    })
}

impl NodeLogsQuery {
    fn check(&self, selects_nothing: bool) -> Result<(), NodeLogsError> {
        let problem = if selects_nothing {
            "query: Required value: cannot be empty with options".to_owned()
        } else if !self.files.is_empty() && !self.services.is_empty() {
            "query: Invalid value: cannot specify a file and service".to_owned()
        } else if self.files.len() > 1 {
            "query: Invalid value: cannot specify more than one file".to_owned()
        } else if !self.files.is_empty() && self.has_options() {
            "query: Invalid value: cannot specify file with options".to_owned()
        } else if self.services.len() > MAX_SERVICES {
            let count = self.services.len();
            format!("query: Too many: {count}: must have at most {MAX_SERVICES} items")
        } else if matches!((self.since, self.until), (Some(since), Some(until)) if since > until) {
            "untilTime: Invalid value: must be after `sinceTime`".to_owned()
        } else {
            return Ok(());
        };
        Err(NodeLogsError::Invalid(problem))
    }

    fn has_options(&self) -> bool {
        self.since.is_some()
            || self.until.is_some()
            || self.tail.is_some()
            || self.pattern.is_some()
            || self.earlier_boot
    }

    /// The lines within the requested time.
    fn select_by_time<'a>(&self, lines: &'a [LogLine]) -> &'a [LogLine] {
        // Lines are sorted by time.
        let first = self
            .since
            .map_or(0, |since| lines.partition_point(|line| line.at < since));
        let end = self.until.map_or(lines.len(), |until| {
            lines.partition_point(|line| line.at <= until)
        });
        lines.get(first..end).unwrap_or_default()
    }

    /// The requested part of the log: by time, then by pattern, then the last lines.
    pub(super) fn text(&self, lines: &[LogLine]) -> String {
        let selected = self.select_by_time(lines).iter();
        let matching: Vec<&LogLine> = selected
            .filter(|line| match &self.pattern {
                Some(pattern) => pattern.is_match(&line.text),
                None => true,
            })
            .collect();
        let skip = self
            .tail
            .map_or(0, |tail| matching.len().saturating_sub(tail));
        let mut text = String::new();
        for line in matching.into_iter().skip(skip) {
            text.push_str(&line.text);
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Vec<LogLine> {
        (0..5)
            .map(|second| LogLine {
                at: Timestamp::from_second(second).unwrap(),
                text: format!("line {second}"),
            })
            .collect()
    }

    #[test]
    fn lines_are_selected_by_time_pattern_and_count() {
        let text = |query: &str| {
            let query = parse(&format!("query=kubelet&{query}")).unwrap().unwrap();
            query.text(&lines()).replace("line ", "").replace('\n', "")
        };
        assert_eq!(text(""), "01234");
        assert_eq!(text("tailLines=2"), "34");
        assert_eq!(text("tailLines=0"), "");
        assert_eq!(text("sinceTime=1970-01-01T00:00:02Z"), "234");
        assert_eq!(text("untilTime=1970-01-01T00:00:02Z"), "012");
        assert_eq!(text("pattern=%5B13%5D&tailLines=1"), "3");
    }

    #[test]
    fn invalid_queries_are_rejected_with_upstreams_messages() {
        for (query, is_undecodable, expected) in [
            ("query=+", true, "may not be empty"),
            ("query=k&sinceTime=yesterday", true, "invalid time format"),
            ("query=k&tailLines=x", true, "not a number"),
            ("query=k&tailLines=100001", false, "between 0 and 100000"),
            ("query=k&boot=1", false, "less than 1"),
            ("query=k&pattern=(", false, "pattern"),
            ("tailLines=1", false, "cannot be empty with options"),
            ("query=k&query=/f", false, "a file and service"),
            ("query=/f&tailLines=1", false, "file with options"),
            ("query=a&query=b&query=c&query=d&query=e", false, "Too many"),
        ] {
            let (message, undecodable) = match parse(query).unwrap_err() {
                NodeLogsError::Undecodable(message) => (message, true),
                NodeLogsError::Invalid(message) => (message, false),
            };
            assert!(message.contains(expected), "{query}: {message}");
            assert_eq!(undecodable, is_undecodable, "{query}");
        }
        assert!(parse("").unwrap().is_none());
        assert!(parse("timeout=3").unwrap().is_none());
    }
}
