//! What is asked of a node's log, in upstream's words: `query`, `sinceTime`, `untilTime`, `tailLines`, `pattern`, `boot`.

use jiff::Timestamp;
use regex::Regex;

use crate::stats::LogLine;

/// The most lines that can be asked for, as upstream.
const MAX_LINES: i64 = 100_000;
/// The most services that can be asked for, as upstream.
const MAX_SERVICES: usize = 4;
/// No pattern needs more memory.
const MAX_PATTERN_SIZE: usize = 1 << 20;

/// Why a query is refused, and whether that is because it can't be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NodeLogsError {
    pub unreadable: bool,
    pub words: String,
}

/// A query that makes sense.
#[derive(Debug, Default)]
pub(super) struct NodeLogsQuery {
    pub services: Vec<String>,
    pub files: Vec<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    tail: Option<usize>,
    pattern: Option<Regex>,
    /// Of an earlier start of the machine, of which we know nothing.
    pub earlier_boot: bool,
}

/// Reads the query of a request; `None` if there is none, so that a file or the list of them is meant.
pub(super) fn parse(text: &str) -> Result<Option<NodeLogsQuery>, NodeLogsError> {
    let mut query = NodeLogsQuery::default();
    let (mut asked, mut any) = (false, false);
    let mut queries = Vec::new();
    for (name, value) in form_urlencoded::parse(text.as_bytes()) {
        let bad = |what: &str| NodeLogsError {
            unreadable: true,
            words: format!("{name}: Invalid value: {value:?}: {what}"),
        };
        match (&*name, &*value) {
            ("query", value) => {
                asked = true;
                queries.push(format!("{value:?}"));
                if value.contains(['/', '\\']) {
                    query.files.push(value.to_owned());
                } else if !value.trim().is_empty() {
                    query.services.push(value.to_owned());
                }
            }
            (_, "") => {}
            ("sinceTime", value) => {
                query.since = Some(value.parse().map_err(|_| bad("invalid time format"))?);
            }
            ("untilTime", value) => {
                query.until = Some(value.parse().map_err(|_| bad("invalid time format"))?);
            }
            ("tailLines", value) => {
                let lines: i64 = value.parse().map_err(|_| bad("it is no number"))?;
                if !(0..=MAX_LINES).contains(&lines) {
                    let words = format!(
                        "{name}: Invalid value: {lines}: must be between 0 and {MAX_LINES}, inclusive"
                    );
                    return Err(refusal(words));
                }
                query.tail = usize::try_from(lines).ok();
            }
            ("boot", value) => {
                let boot: i64 = value.parse().map_err(|_| bad("it is no number"))?;
                if boot > 0 {
                    return Err(refusal(format!(
                        "boot: Invalid value: {boot}: must be less than 1"
                    )));
                }
                query.earlier_boot = boot < 0;
            }
            ("pattern", value) => {
                let pattern = regex::RegexBuilder::new(value)
                    .size_limit(MAX_PATTERN_SIZE)
                    .build();
                let pattern = pattern.map_err(|error| {
                    refusal(format!("pattern: Invalid value: {value:?}: {error}"))
                })?;
                query.pattern = Some(pattern);
            }
            _ => continue,
        }
        any = true;
    }
    let nothing = query.services.is_empty() && query.files.is_empty();
    if asked && nothing {
        let words = format!(
            "query: Invalid value: [{}]: may not be empty",
            queries.join(", ")
        );
        return Err(NodeLogsError {
            unreadable: true,
            words,
        });
    }
    if !any {
        return Ok(None);
    }
    query.check(nothing)?;
    Ok(Some(query))
}

impl NodeLogsQuery {
    fn check(&self, nothing: bool) -> Result<(), NodeLogsError> {
        let problem = if nothing {
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
        Err(refusal(problem))
    }

    fn has_options(&self) -> bool {
        self.since.is_some()
            || self.until.is_some()
            || self.tail.is_some()
            || self.pattern.is_some()
            || self.earlier_boot
    }

    /// The lines that are asked for.
    pub(super) fn select<'a>(&self, lines: &'a [LogLine]) -> &'a [LogLine] {
        // Lines are in the order of their times.
        let first = self
            .since
            .map_or(0, |since| lines.partition_point(|line| line.at < since));
        let end = self.until.map_or(lines.len(), |until| {
            lines.partition_point(|line| line.at <= until)
        });
        lines.get(first..end).unwrap_or_default()
    }

    /// The text of these lines: those that match, and of these the last.
    pub(super) fn text(&self, lines: &[LogLine]) -> String {
        let selected = self.select(lines).iter();
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

fn refusal(words: String) -> NodeLogsError {
    NodeLogsError {
        unreadable: false,
        words,
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
    fn lines_are_chosen_by_time_number_and_pattern() {
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
    fn what_makes_no_sense_is_refused_in_upstreams_words() {
        let refused = |query: &str| parse(query).map(|_| ()).unwrap_err();
        for (query, unreadable, words) in [
            ("query=+", true, "may not be empty"),
            ("query=k&sinceTime=yesterday", true, "invalid time format"),
            ("query=k&tailLines=x", true, "no number"),
            ("query=k&tailLines=100001", false, "between 0 and 100000"),
            ("query=k&boot=1", false, "less than 1"),
            ("query=k&pattern=(", false, "pattern"),
            ("tailLines=1", false, "cannot be empty with options"),
            ("query=k&query=/f", false, "a file and service"),
            ("query=/f&tailLines=1", false, "file with options"),
            ("query=a&query=b&query=c&query=d&query=e", false, "Too many"),
        ] {
            let refusal = refused(query);
            assert!(refusal.words.contains(words), "{query}: {}", refusal.words);
            assert_eq!(refusal.unreadable, unreadable, "{query}");
        }
        assert!(parse("").unwrap().is_none());
        assert!(parse("timeout=3").unwrap().is_none());
    }
}
