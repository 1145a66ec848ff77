//! The idle time-out of exec, attach and port-forward streams.

use std::time::Duration;

use anyhow::Context;

/// For example `90s`, `10m` or `4h`. Upstream's kubelet calls it `streamingConnectionIdleTimeout`.
const STREAM_IDLE_VARIABLE: &str = "CORACLE_STREAM_IDLE";

/// The time-out from the environment, or upstream's default.
pub fn from_environment() -> anyhow::Result<Duration> {
    match std::env::var(STREAM_IDLE_VARIABLE)
        .unwrap_or_default()
        .as_str()
    {
        "" => Ok(kubelet_api::STREAM_IDLE_TIMEOUT),
        text => parse(text).with_context(|| {
            format!("{STREAM_IDLE_VARIABLE}: {text:?} is not like 90s, 10m or 4h")
        }),
    }
}

fn parse(text: &str) -> Option<Duration> {
    let unit = match text.chars().last()? {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return None,
    };
    let number: u64 = text.get(..text.len() - 1)?.parse().ok()?;
    let seconds = number.checked_mul(unit)?;
    (seconds > 0).then_some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_out_needs_a_unit() {
        assert_eq!(parse("90s"), Some(Duration::from_secs(90)));
        assert_eq!(parse("10m"), Some(Duration::from_secs(600)));
        assert_eq!(parse("4h"), Some(Duration::from_secs(14400)));
        for text in [
            "",
            "s",
            "0s",
            "90",
            "-1s",
            "1d",
            "99999999999999999999h",
            "\u{e9}",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
