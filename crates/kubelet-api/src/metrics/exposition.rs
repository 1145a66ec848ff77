//! The Prometheus text exposition format: counters and gauges.

use std::fmt::{self, Write};

use jiff::Timestamp;

/// The content type of version 0.0.4 of the format.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metric families, in the order of their first sample.
#[derive(Default)]
pub(super) struct Exposition(Vec<MetricFamily>);

#[derive(Clone, Copy)]
enum MetricType {
    Counter,
    Gauge,
}

impl fmt::Display for MetricType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        })
    }
}

struct MetricFamily {
    name: &'static str,
    metric_type: MetricType,
    help: &'static str,
    samples: String,
}

pub(super) type Labels<'a> = [(&'a str, &'a str)];

impl Exposition {
    /// A writer for the next sample of a counter, whose family is added if it is new.
    pub(super) fn counter(&mut self, name: &'static str, help: &'static str) -> SampleWriter<'_> {
        self.family(name, MetricType::Counter, help)
    }

    /// Like [`counter`](Self::counter), for a gauge.
    pub(super) fn gauge(&mut self, name: &'static str, help: &'static str) -> SampleWriter<'_> {
        self.family(name, MetricType::Gauge, help)
    }

    fn family(
        &mut self,
        name: &'static str,
        metric_type: MetricType,
        help: &'static str,
    ) -> SampleWriter<'_> {
        let index = self.0.iter().position(|family| family.name == name);
        let index = index.unwrap_or_else(|| {
            self.0.push(MetricFamily {
                name,
                metric_type,
                help,
                samples: String::new(),
            });
            self.0.len() - 1
        });
        SampleWriter(&mut self.0[index])
    }

    /// All families in the text format.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for family in &self.0 {
            let MetricFamily {
                name,
                metric_type,
                help,
                samples,
            } = family;
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {metric_type}\n{samples}"
            );
        }
        text
    }
}

/// Adds one sample to a family.
pub(super) struct SampleWriter<'a>(&'a mut MetricFamily);

impl SampleWriter<'_> {
    /// Adds a value without a timestamp.
    pub(super) fn value(self, labels: &Labels<'_>, value: f64) {
        self.put(labels, value, None);
    }

    /// Adds a value with a timestamp.
    pub(super) fn value_at(self, labels: &Labels<'_>, value: f64, time: Timestamp) {
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

/// Nanoseconds as seconds.
pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// A time as seconds since the epoch.
pub(super) fn unix_seconds(time: Timestamp) -> f64 {
    time.as_millisecond() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_grouped_and_labels_escaped() {
        let mut text = Exposition::default();
        text.counter("a_total", "A.").value(&[("x", "1")], 1.5);
        text.gauge("b", "B.").value(&[], 2.0);
        let time = Timestamp::from_second(3).unwrap();
        text.counter("a_total", "A.")
            .value_at(&[("x", "a\"b\\\n"), ("y", "")], 1e12, time);
        insta::assert_snapshot!(text.render());
    }
}
