//! Prometheus' text format, as far as it is needed: families of counters and gauges.

use std::fmt::Write;

use jiff::Timestamp;

/// What Prometheus is told that it gets.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Families of samples, in the order in which they were begun.
#[derive(Default)]
pub(super) struct Exposition(Vec<Family>);

struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: String,
}

/// The labels of a sample.
pub(super) type Labels<'a> = [(&'a str, &'a str)];

impl Exposition {
    /// Adds a sample of something that only grows.
    pub(super) fn counter(&mut self, name: &'static str, help: &'static str) -> SampleWriter<'_> {
        self.family(name, "counter", help)
    }

    /// Adds a sample of something that comes and goes.
    pub(super) fn gauge(&mut self, name: &'static str, help: &'static str) -> SampleWriter<'_> {
        self.family(name, "gauge", help)
    }

    fn family(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
    ) -> SampleWriter<'_> {
        let index = self.0.iter().position(|family| family.name == name);
        let index = index.unwrap_or_else(|| {
            self.0.push(Family {
                name,
                kind,
                help,
                samples: String::new(),
            });
            self.0.len() - 1
        });
        SampleWriter(&mut self.0[index])
    }

    /// All of it.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for family in &self.0 {
            let Family {
                name,
                kind,
                help,
                samples,
            } = family;
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}"
            );
        }
        text
    }
}

/// A sample that is about to get its value.
pub(super) struct SampleWriter<'a>(&'a mut Family);

impl SampleWriter<'_> {
    /// Its value, now.
    pub(super) fn now(self, labels: &Labels<'_>, value: f64) {
        self.put(labels, value, None);
    }

    /// Its value at a time.
    pub(super) fn at(self, labels: &Labels<'_>, value: f64, time: Timestamp) {
        self.put(labels, value, Some(time));
    }

    fn put(self, labels: &Labels<'_>, value: f64, time: Option<Timestamp>) {
        let out = &mut self.0.samples;
        out.push_str(self.0.name);
        for (index, (name, value)) in labels.iter().enumerate() {
            out.push(if index == 0 { '{' } else { ',' });
            let _ = write!(out, "{name}=\"{}\"", escaped(value));
        }
        if !labels.is_empty() {
            out.push('}');
        }
        let _ = write!(out, " {value}");
        if let Some(time) = time {
            let _ = write!(out, " {}", time.as_millisecond());
        }
        out.push('\n');
    }
}

fn escaped(value: &str) -> String {
    value
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n")
}

/// Nanoseconds as Prometheus wants time.
pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// A time as Prometheus wants it.
pub(super) fn since_1970(time: Timestamp) -> f64 {
    time.as_millisecond() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_stay_together_and_labels_are_escaped() {
        let mut text = Exposition::default();
        text.counter("a_total", "A.").now(&[("x", "1")], 1.5);
        text.gauge("b", "B.").now(&[], 2.0);
        let time = Timestamp::from_second(3).unwrap();
        text.counter("a_total", "A.")
            .at(&[("x", "a\"b\\\n"), ("y", "")], 1e12, time);
        insta::assert_snapshot!(text.render());
    }
}
